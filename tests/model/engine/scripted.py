"""A policy that is scripted: its logits are a function of the whole history, exact whatever the batch."""

from types import SimpleNamespace

import numpy as np
import torch

from model.cache.pages import PageTable

VOCAB = 64


PAGE_TOKENS = 4


class ScriptedCache:
    """Sequences as lists; with `pages`, on the pages of a real table."""

    def __init__(self, max_sequences, max_tokens, pages=None):
        self.max_tokens = max_tokens
        self.sequences = {}
        self.free_slots = list(range(max_sequences))
        self.pages = None
        if pages is not None:
            per_slot = -(-max_tokens // PAGE_TOKENS)
            self.pages = PageTable(max_sequences, per_slot, pages, PAGE_TOKENS, torch.device("cpu"))

    def allocate(self):
        slot = self.free_slots.pop()
        self.sequences[slot] = []
        if self.pages is not None:
            self.pages.clear(slot)
        return slot

    def fork(self, slot):
        copy = self.allocate()
        self.sequences[copy] = list(self.sequences[slot])
        if self.pages is not None:
            self.pages.share(slot, copy, len(self.sequences[slot]))
        return copy

    def free(self, slot):
        del self.sequences[slot]
        self.free_slots.append(slot)
        if self.pages is not None:
            self.pages.release(slot)

    def append(self, slots, tokens):
        if self.pages is not None:
            held, new = [self.length(slot) for slot in slots], [len(ids) for ids in tokens]
            assert self.pages.missing(slots, held, new) <= self.pages.free_pages
            self.pages.reserve(slots, held, new)
        for slot, ids in zip(slots, tokens, strict=True):
            self.sequences[slot] += ids
            assert len(self.sequences[slot]) <= self.max_tokens

    def export_slot(self, slot):
        return {"sequence": torch.tensor(self.sequences[slot])}

    def check_slot(self, state):
        return len(state["sequence"])

    def import_slot(self, state):
        slot = self.allocate()
        self.append([slot], [state["sequence"].tolist()])
        return slot

    def length(self, slot):
        return len(self.sequences[slot])


class ScriptedPolicy:
    """Logits are normal draws seeded by the history, times the weight `scale`."""

    def __init__(self):
        self.config = SimpleNamespace(vocab_size=VOCAB, decoder_start=None)
        self.fake_quant = self.exact = False
        self.scale = torch.ones(1)
        self.calls = []
        self.cache = None

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state_dict, strict=True):
        self.scale.copy_(state_dict["scale"])

    def new_cache(self, max_sequences, max_tokens, storage="dense", pages=None):
        self.cache = ScriptedCache(max_sequences, max_tokens, pages)
        return self.cache

    def extend(self, cache, slots, token_ids, lengths):
        self.calls.append(tuple(lengths.tolist()))
        assert len(set(slots.tolist())) == len(slots)
        rows = zip(token_ids.tolist(), lengths.tolist(), strict=True)
        assert all(1 <= length <= token_ids.shape[1] for length in lengths.tolist())
        cache.append(slots.tolist(), [ids[:length] for ids, length in rows])
        return torch.stack([self.hidden(cache.sequences[slot]) for slot in slots.tolist()])

    @staticmethod
    def hidden(history):
        state = 1
        for token in history:
            state = (state * 1_000_003 + token + 7) % (2**31 - 1)
        return torch.tensor([float(state), float(history[-1])], dtype=torch.float64)

    def logits(self, hidden):
        rows = []
        for state, last in hidden.tolist():
            row = np.random.default_rng(int(state)).standard_normal(VOCAB).astype(np.float32) * 2
            row[VOCAB - 1] = -100.0  # so that no one but a test's prompt brings the poison
            rows.append(np.full(VOCAB, np.nan, np.float32) if last == VOCAB - 1 else row)
        return torch.from_numpy(np.stack(rows)) * self.scale
