"""A policy that is scripted: its logits are a function of the whole history, exact whatever the batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

VOCAB = 64


class ScriptedCache:
    def __init__(self, max_sequences, max_tokens):
        self.max_tokens = max_tokens
        self.sequences = {}
        self.free_slots = list(range(max_sequences))

    def allocate(self):
        slot = self.free_slots.pop()
        self.sequences[slot] = []
        return slot

    def fork(self, slot):
        copy = self.allocate()
        self.sequences[copy] = list(self.sequences[slot])
        return copy

    def free(self, slot):
        del self.sequences[slot]
        self.free_slots.append(slot)

    def length(self, slot):
        return len(self.sequences[slot])


class ScriptedPolicy:
    """Logits are normal draws seeded by the history, times the weight `scale`."""

    def __init__(self):
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.scale = torch.ones(1)
        self.calls = []
        self.cache = None

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state_dict, strict=True):
        self.scale.copy_(state_dict["scale"])

    def new_cache(self, max_sequences, max_tokens):
        self.cache = ScriptedCache(max_sequences, max_tokens)
        return self.cache

    def extend(self, cache, slots, token_ids, lengths):
        self.calls.append(tuple(lengths.tolist()))
        assert len(set(slots.tolist())) == len(slots)
        for slot, ids, length in zip(slots.tolist(), token_ids.tolist(), lengths.tolist(), strict=True):
            assert 1 <= length <= len(ids)
            cache.sequences[slot] += ids[:length]
            assert len(cache.sequences[slot]) <= cache.max_tokens
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


@pytest.fixture
def scripted_policy():
    return ScriptedPolicy()
