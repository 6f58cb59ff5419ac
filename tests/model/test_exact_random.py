"""Exact mode on the path of kernels: random policies, and random ways to come to a token.

Prefills of several sequences, decoder skipped or not, steps in batches, forks, tokens taken back, moves to
other slots, over caches that hold other numbers wherever nothing was written.
"""

import random
from dataclasses import replace

import pytest
import torch

from model.batch import floors_from_starts
from model.cache.policy_cache import PolicyCache
from model.cache.record_rows import RecordRows
from model.ops import dispatch
from model.ops.records import pack
from model.policy import PackedTokens, Policy
from model.presets import NANO
from tests.model import wide_definitions

SCHEDULES = [
    ((0, 2, 2, 1, 1, 1), (1, 3), (1, 3, 4), 3),
    ((0, 2, 2, 2, 1, 1), (1, 2, 4), (1, 2, 3, 4, 5), 4),
    ((0, 4, 4, 1, 1, 1), (1, 3), (1, 2, 3, 4, 5), 3),
    ((0, 0, 2, 2, 2, 2), (2, 3, 4), (2, 3, 4, 5), -1),
    ((2, 2, 1, 1, 0, 1), (0, 2), (0, 2, 3, 5), 2),
    ((1, 1, 1, 1, 1, 1), (0, 3), (0, 1, 3, 4), 3),
    ((0, 3, 3, 2, 2, 2), (1, 3), (1, 2, 3, 5), 3),
    ((0, 1, 1, 2, 2, 2), (1, 3, 4), (1, 3, 4, 5), 4),
]


class Case:
    """One policy, some documents, and how they came into a cache."""

    def __init__(self, seed: int, longest: int) -> None:
        self.draw, self.noise = random.Random(seed), torch.Generator().manual_seed(seed)
        draw = self.draw
        ratios, sources, indexed, candidates = SCHEDULES[seed % len(SCHEDULES)]
        shape = replace(
            NANO,
            compress_ratios=ratios,
            kv_source_layer_ids=sources,
            index_source_layer_ids=indexed,
            candidate_source_layer_id=candidates,
            candidate_topk_blocks=draw.choice([1, 2, 3, 8]),
            candidate_block_size=draw.choice([1, 2, 4, 8]),
            num_attention_heads=16,
            head_dim=64,
            index_head_dim=64,
            hc_sinkhorn_iters=20,
            dtype="bfloat16",
            index_topk=draw.choice([1, 3, 4, 8, 40]),
            sliding_window=draw.choice([1, 2, 5, 8, 9, 16, 40]),
        )
        self.policy = Policy(shape)
        self.policy.reset_parameters(seed)
        self.policy.fake_quant = self.policy.exact = True
        for block in self.policy.blocks:
            block.attn.attn_sink.data.normal_(generator=self.noise)
        words, count = draw.choice([1, 2, 64]), draw.choice([1, 2, 3, 9])
        self.ids = [self._words((draw.randint(2, longest),), words) for _ in range(count)]
        self.slack = draw.choice([1, 2, 8])
        device = self.policy.device
        self.cache = PolicyCache(
            shape, count + 4, longest + 16, torch.bfloat16, device, "packed", slack=self.slack
        )
        self._fill_with_noise()
        for _ in range(draw.randint(0, 2)):
            self.cache.allocate()
        self.slots = [self.cache.allocate() for _ in range(count)]
        self.at = [0] * count
        self.floors: list[set[tuple[int, int]]] = [set() for _ in range(count)]
        self.got: dict[tuple[int, int], torch.Tensor] = {}

    def _words(self, size: tuple[int, ...], words: int) -> torch.Tensor:
        return torch.randint(0, words, size, generator=self.noise)

    def _fill_with_noise(self) -> None:
        def noise(*size):
            return 5 * torch.randn(*size, generator=self.noise)

        for kind, caches, width in (("main", self.cache.main, 64), ("index", self.cache.index_keys, 64)):
            for rows in caches.values():
                assert isinstance(rows, RecordRows)
                rest = rows.records[rows.page_groups :]
                rest.copy_(pack(kind, noise(len(rest), width)))
        storage = self.cache.windows.storage
        storage.copy_(pack("window", noise(*storage.shape[:-1], 64)))
        for pending in self.cache.pending.values():
            pending.copy_(noise(*pending.shape))
        self.cache.tail.copy_(self._words(tuple(self.cache.tail.shape), 60))

    def extend(self, documents, lengths, decode_from=None) -> None:
        tokens = torch.zeros(len(documents), max(lengths), dtype=torch.long)
        for row, (d, length) in enumerate(zip(documents, lengths, strict=True)):
            tokens[row, :length] = self.ids[d][self.at[d] : self.at[d] + length]
        slots = torch.tensor([self.slots[d] for d in documents])
        start = None if decode_from is None else torch.tensor(decode_from)
        hidden = self.policy.extend(self.cache, slots, tokens, torch.tensor(lengths), decode_from=start)
        for d, length, result in zip(documents, lengths, hidden, strict=True):
            self.at[d] += length
            self.got[d, self.at[d] - 1] = result
            self.floors[d].add(self.cache.floors(self.slots[d]))

    def steps(self, documents) -> None:
        for _ in range(self.draw.randint(1, 6)):
            documents = [d for d in documents if self.at[d] < len(self.ids[d])]
            if documents:
                self.extend(documents, [1] * len(documents))

    def prefill(self, documents) -> None:
        lengths = [
            min(self.draw.choice([1, 2, 3, 7, 30, 100]), len(self.ids[d]) - self.at[d]) for d in documents
        ]
        begins = None
        if self.policy.config.decoder_start is not None and self.draw.random() < 0.5:
            ends = [self.at[d] + length for d, length in zip(documents, lengths, strict=True)]
            begins = [max(0, end - self.draw.choice([1, 2, 5, 20])) for end in ends]
        self.extend(documents, lengths, begins)

    def take_back(self, d: int) -> None:
        least = max(self.cache.progress(self.slots[d]).least(self.slack), 1)
        if least <= self.at[d]:
            self.at[d] = self.draw.randint(least, self.at[d])
            self.cache.truncate(self.slots[d], self.at[d])
            self.got = {key: x for key, x in self.got.items() if key[0] != d or key[1] < self.at[d]}

    def move(self, d: int) -> None:
        old, cache = self.slots[d], self.cache
        if self.draw.random() < 0.5:
            self.slots[d] = cache.fork(old)
            other = self._words((1, self.draw.randint(1, 9)), 60)
            self.policy.extend(cache, torch.tensor([old]), other, torch.tensor([other.shape[1]]))
            cache.free(old)
        else:
            state = cache.export_slot(old)
            cache.free(old)
            self.slots[d] = cache.import_slot(state)

    def play(self) -> None:
        while live := [d for d, ids in enumerate(self.ids) if self.at[d] < len(ids)]:
            documents, what = self.draw.sample(live, self.draw.randint(1, len(live))), self.draw.random()
            if what < 0.7:
                self.steps(documents)
            elif what < 0.85:
                self.prefill(documents)
            elif self.at[documents[0]]:
                (self.take_back if what < 0.95 else self.move)(documents[0])

    def differing(self) -> list[tuple[int, int]]:
        """Document and position of the tokens whose result is not that of training."""
        bounds = torch.tensor([0, *map(len, self.ids)]).cumsum(0)
        floors = torch.cat(
            [floors_from_starts(len(i), sorted(f)) for i, f in zip(self.ids, self.floors, strict=True)]
        )
        packed = PackedTokens(torch.cat(self.ids), bounds, window_floors=floors if floors.any() else None)
        hidden = self.policy(packed).hidden
        return [(d, t) for (d, t), x in self.got.items() if x.any() and not x.equal(hidden[bounds[d] + t])]


def run(seed: int, longest: int) -> Case:
    with torch.no_grad(), dispatch.fused_everywhere():
        case = Case(seed, longest)
        case.play()
    return case


def differing(case: Case) -> list[tuple[int, int]]:
    with torch.no_grad(), dispatch.fused_everywhere():
        return case.differing()


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    wide_definitions.put(monkeypatch)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_have_the_bits_of_training_however_they_came(seed):
    assert differing(run(seed, 40)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 132))
def test_tokens_of_longer_documents_have_the_bits_of_training(seed):
    assert differing(run(seed, 110)) == []


def test_a_difference_is_found():
    case = run(1, 40)
    case.ids[0][0] ^= 1
    assert differing(case)
