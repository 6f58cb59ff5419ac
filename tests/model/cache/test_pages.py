"""Pages under random use: no leak, no page handed out twice, and every sequence reads what it wrote."""

import random

import pytest
import torch

from model.cache.pages import NULL_PAGE, PageTable
from model.cache.policy_cache import CacheFull, PolicyCache
from model.config import PolicyConfig
from model.quant.blocks import round_index, round_main
from model.rows import Rows

SLOTS, PER_SLOT, PAGES, PAGE_TOKENS = 8, 6, 20, 4


class Memory:
    """Tokens written where a table says, beside what every sequence should read."""

    def __init__(self):
        self.table = PageTable(SLOTS, PER_SLOT, PAGES, PAGE_TOKENS, torch.device("cpu"))
        self.cells = [[None] * PAGE_TOKENS for _ in range(PAGES + 1)]
        self.expected = {}

    def allocate(self, slot):
        self.table.clear(slot)
        self.expected[slot] = []

    def append(self, slots, counts, draw):
        """Append to all slots, or, where pages are short, nothing."""
        lengths = [len(self.expected[slot]) for slot in slots]
        missing, free = self.table.missing(slots, lengths, counts), self.table.free_pages
        if missing > free:
            return False
        for source, target in self.table.reserve(slots, lengths, counts):
            self.cells[target] = list(self.cells[source])
        assert free - self.table.free_pages == missing
        for slot, count in zip(slots, counts, strict=True):
            for _ in range(count):
                at, token = len(self.expected[slot]), draw.random()
                self.cells[self.table.owned(slot)[at // PAGE_TOKENS]][at % PAGE_TOKENS] = token
                self.expected[slot].append(token)
        return True

    def fork(self, slot, target, length):
        self.allocate(target)
        self.table.share(slot, target, length)
        self.expected[target] = self.expected[slot][:length]

    def free(self, slot):
        self.table.release(slot)
        del self.expected[slot]

    def check(self, slot):
        pages = self.table.owned(slot)
        read = [cell for page in pages for cell in self.cells[page]]
        assert read[: len(self.expected[slot])] == self.expected[slot]

    def check_all(self):
        for slot in self.expected:
            self.check(slot)
            row = self.table.table[slot].tolist()
            assert row == [*self.table.owned(slot), *[NULL_PAGE] * (PER_SLOT - len(self.table.owned(slot)))]
        lying = [page for slot in self.expected for page in self.table.owned(slot)]
        assert NULL_PAGE not in lying
        assert self.table.free_pages == PAGES - len(set(lying))
        assert all(self.table.references(page) == lying.count(page) for page in range(1, PAGES + 1))


@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_random_operations(seed):
    draw, memory = random.Random(seed), Memory()
    refused = 0
    for operation in range(10_000):
        held = list(memory.expected)
        spare = [slot for slot in range(SLOTS) if slot not in memory.expected]
        kind = draw.choice(["allocate", "append", "append", "append", "fork", "fork", "free"])
        if kind == "allocate" and spare:
            memory.allocate(spare[0])
        elif kind == "append" and held:
            slots = draw.sample(held, draw.randint(1, len(held)))
            rooms = [PER_SLOT * PAGE_TOKENS - len(memory.expected[slot]) for slot in slots]
            pairs = [
                (slot, draw.randint(1, min(room, 7))) for slot, room in zip(slots, rooms, strict=True) if room
            ]
            refused += not memory.append(*map(list, zip(*pairs, strict=True)), draw) if pairs else 0
        elif kind == "fork" and held and spare:
            origin = draw.choice(held)
            whole = len(memory.expected[origin])
            memory.fork(origin, spare[0], draw.choice([whole, whole, draw.randint(0, whole)]))
        elif kind == "free" and held:
            memory.free(draw.choice(held))
        for slot in memory.expected:
            memory.check(slot)
        if operation % 20 == 0:
            memory.check_all()
    assert refused > 100
    for slot in list(memory.expected):
        memory.free(slot)
    memory.check_all()
    assert memory.table.free_pages == PAGES


def test_records_survive_random_forks_and_frees():
    """The same with real records in real pages, through the cache."""
    config, draw = PolicyConfig.preset("pico"), random.Random(5)
    cache = PolicyCache(config, 5, 200, torch.float32, torch.device("cpu"), "packed", pages=9)
    layer, expected = config.kv_source_layer_ids[-1], {}
    for _ in range(300):
        kind = draw.choice(["append", "append", "append", "fork", "free"])
        if not expected or (kind == "fork" and cache.free_slots and draw.random() < 0.3):
            expected[cache.allocate()] = (
                torch.zeros(0, config.head_dim),
                torch.zeros(0, config.index_head_dim),
            )
        elif kind == "fork" and cache.free_slots:
            origin = draw.choice(list(expected))
            expected[cache.fork(origin)] = expected[origin]
        elif kind == "free" and expected:
            slot = draw.choice(list(expected))
            cache.free(slot)
            del expected[slot]
        elif expected:
            _append(cache, config, layer, expected, draw)
        for slot, (main, index) in expected.items():
            slots, width = torch.tensor([slot]), cache.length(slot)
            assert torch.equal(cache.main[layer].gather(slots, width).dense()[0], main)
            assert torch.equal(cache.index_keys[layer].gather(slots, width).dense()[0], index)
    for slot in expected:
        cache.free(slot)
    assert cache.pages.free_pages == 9 and cache.free_slots == 5


def _append(cache, config, layer, expected, draw):
    slot, count = draw.choice(list(expected)), draw.choice([1, 2, 30, 64])
    start = cache.length(slot)
    try:
        spans = cache.make_room([slot], [count])
    except CacheFull:
        assert cache.length(slot) == start
        return
    target = cache.target(torch.tensor([slot]))
    plan = Rows([start], [count], [0], count, 16, torch.device("cpu"), target).groups(1)
    main, index = torch.randn(1, count, config.head_dim), torch.randn(1, count, config.index_head_dim)
    cache.main[layer].append(plan, main, main)
    cache.index_keys[layer].append(plan, index, index)
    cache.advance([slot], spans)
    held = expected[slot]
    expected[slot] = (torch.cat([held[0], round_main(main[0])]), torch.cat([held[1], round_index(index[0])]))
