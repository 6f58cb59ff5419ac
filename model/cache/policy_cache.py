"""All state of the sequences an engine holds, by slot: allocate, extend through the policy, fork, free."""

from __future__ import annotations

import torch
from torch import Tensor

from model.cache.main_kv import GroupCache
from model.cache.swa import WindowRing
from model.config import PolicyConfig


class CacheFull(ValueError):
    """No slot is free, or a sequence would outgrow its slot."""


class PolicyCache:
    """Storage for `max_sequences` sequences of up to `max_tokens` tokens each."""

    def __init__(
        self,
        config: PolicyConfig,
        max_sequences: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if max_sequences < 1 or max_tokens < 1:
            raise ValueError(
                f"a cache needs room: got max_sequences {max_sequences}, max_tokens {max_tokens}"
            )
        self.max_sequences, self.max_tokens, self.device = max_sequences, max_tokens, device
        self.windows = WindowRing(
            config.num_hidden_layers, max_sequences, config.sliding_window, config.head_dim, dtype, device
        )
        self.main: dict[int, GroupCache] = {}
        self.index_keys: dict[int, GroupCache] = {}
        self.pending: dict[int, Tensor] = {}
        for layer in config.kv_source_layer_ids:
            ratio = config.ratio(layer)
            groups = -(-max_tokens // ratio)
            self.main[layer] = GroupCache(max_sequences, groups, config.head_dim, dtype, device)
            self.index_keys[layer] = GroupCache(max_sequences, groups, config.index_head_dim, dtype, device)
            if ratio > 1:
                # Keys and gates of the tokens of an open group, float32, entry = position mod ratio.
                shape = (max_sequences, ratio, 2 * config.head_dim)
                self.pending[layer] = torch.zeros(shape, device=device)
        self.tail = torch.zeros(
            max_sequences, max(config.engram_max_ngram_size - 1, 0), dtype=torch.int64, device=device
        )
        self.blank_tail = 0
        self._lengths: list[int | None] = [None] * max_sequences
        self._free = list(range(max_sequences - 1, -1, -1))

    def allocate(self) -> int:
        """A slot with an empty sequence. Raises CacheFull when none is free."""
        if not self._free:
            raise CacheFull(f"all {self.max_sequences} slots are taken: free one, or make the cache larger")
        slot = self._free.pop()
        self._lengths[slot] = 0
        self.tail[slot] = self.blank_tail
        return slot

    def fork(self, slot: int) -> int:
        """A new slot with a copy of the sequence in `slot`."""
        length = self.length(slot)
        copy = self.allocate()
        self.windows.copy(slot, copy)
        for group_cache in (*self.main.values(), *self.index_keys.values()):
            group_cache.copy(slot, copy)
        for pending in self.pending.values():
            pending[copy] = pending[slot]
        self.tail[copy] = self.tail[slot]
        self._lengths[copy] = length
        return copy

    def free(self, slot: int) -> None:
        """Give `slot` back."""
        self.length(slot)
        self._lengths[slot] = None
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Tokens held in `slot`. Raises ValueError when it is not allocated."""
        length = self._lengths[slot] if 0 <= slot < self.max_sequences else None
        if length is None:
            raise ValueError(f"slot {slot} is not allocated: call allocate() or fork() first")
        return length

    @property
    def free_slots(self) -> int:
        """How many sequences can still be allocated."""
        return len(self._free)

    def check_room(self, slots: list[int], lengths: list[int]) -> None:
        """Raise before anything is written: ValueError for unusable slots, CacheFull for a long sequence."""
        if len(set(slots)) != len(slots):
            raise ValueError("a slot appears twice in one call: extend each sequence once a call")
        for slot, new in zip(slots, lengths, strict=True):
            if self.length(slot) + new > self.max_tokens:
                raise CacheFull(
                    f"slot {slot} holds {self.length(slot)} tokens and has room for {self.max_tokens}: "
                    f"{new} more do not fit; shorten the sequence or make the cache larger"
                )

    def advance(self, slots: list[int], lengths: list[int]) -> None:
        """Count the tokens that have been appended."""
        for slot, new in zip(slots, lengths, strict=True):
            self._lengths[slot] = self.length(slot) + new
