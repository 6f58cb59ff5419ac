"""Keys and values of the sequences that an engine serves, for any model: one slot a sequence, as floats.

The engine's scheduler allocates, forks, frees, exports and imports slots; the attention writes and reads. The
width of a layer's keys is not to be told from a configuration in general, so its storage is made when its
first keys come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model.cache.policy_cache import CacheFull

_VERSION = "hf1"
_LENGTH = f"{_VERSION}.length"


class HFCache:
    """At most `max_sequences` sequences of at most `max_tokens` tokens."""

    storage: Any = "dense"
    pages: Any = None

    def __init__(self, layers: int, max_sequences: int, max_tokens: int, device: torch.device) -> None:
        self.layers, self.max_sequences, self.max_tokens = layers, max_sequences, max_tokens
        self.device = device
        self._stores: dict[str, Tensor] = {}
        self._lengths: list[int | None] = [None] * max_sequences
        self._free = list(range(max_sequences - 1, -1, -1))

    def allocate(self) -> int:
        """Returns a free, empty slot. Raises CacheFull when there is none."""
        if not self._free:
            raise CacheFull(f"all {self.max_sequences} slots are taken: free one, or make the cache larger")
        slot = self._free.pop()
        self._lengths[slot] = 0
        return slot

    def fork(self, slot: int) -> int:
        """Returns a new slot with the same content. Raises CacheFull when none is free."""
        length, copy = self.length(slot), self.allocate()
        for store in self._stores.values():
            store[copy, :length] = store[slot, :length]
        self._lengths[copy] = length
        return copy

    def free(self, slot: int) -> None:
        """Gives a slot back."""
        self.length(slot)
        self._lengths[slot] = None
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Returns the tokens held in a slot. Raises ValueError when it is not allocated."""
        length = self._lengths[slot] if 0 <= slot < self.max_sequences else None
        if length is None:
            raise ValueError(f"slot {slot} is not allocated: call allocate() or fork() first")
        return length

    def make_room(self, slots: list[int], lengths: list[int]) -> list[int]:
        """Returns where the new tokens of each slot begin.

        Raises:
            CacheFull: A sequence would be too long; nothing has changed.
            ValueError: A slot is not allocated or appears twice.
        """
        if len(set(slots)) != len(slots):
            raise ValueError("a slot appears twice in one call: extend each sequence once a call")
        starts = [self.length(slot) for slot in slots]
        for slot, start, new in zip(slots, starts, lengths, strict=True):
            if start + new > self.max_tokens:
                raise CacheFull(
                    f"slot {slot} holds {start} tokens and has room for {self.max_tokens}: {new} more do not "
                    "fit; shorten the sequence or make the cache larger"
                )
        return starts

    def advance(self, slots: list[int], lengths: list[int]) -> None:
        """Counts new tokens that every layer has written."""
        for slot, new in zip(slots, lengths, strict=True):
            self._lengths[slot] = self.length(slot) + new

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores [T, kv heads, d] keys and values of tokens at `positions` [T] of `slots` [T]."""
        for name, rows in ((f"{layer}.k", keys), (f"{layer}.v", values)):
            self._store(name, rows.shape[1:], rows.dtype)[slots, positions] = rows

    def read(self, layer: int, slots: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, end, kv heads, d] of `slots` [B]; what lies behind a sequence is undefined."""
        keys, values = self._stores[f"{layer}.k"], self._stores[f"{layer}.v"]
        return keys[:, :end][slots], values[:, :end][slots]

    def export_slot(self, slot: int) -> dict[str, Tensor]:
        """Returns copies of everything that is held of a slot."""
        length = self.length(slot)
        state = {_LENGTH: torch.tensor(length)}
        return state | {
            f"{_VERSION}.{name}": store[slot, :length].clone() for name, store in self._stores.items()
        }

    def check_slot(self, state: Mapping[str, Tensor]) -> int:
        """Returns the tokens of an exported slot. Raises ValueError when it does not fit."""
        names = {_LENGTH, *(f"{_VERSION}.{i}.{kind}" for i in range(self.layers) for kind in "kv")}
        if state.keys() != names:
            raise ValueError(
                f"the exported caches hold other layers than this policy has ({len(state)} tensors, not "
                f"{len(names)}): compute them anew"
            )
        length = int(state[_LENGTH])
        for name, rows in state.items():
            own = self._stores.get(name.removeprefix(f"{_VERSION}."))
            if own is not None and (rows.shape[1:] != own.shape[2:] or rows.dtype != own.dtype):
                raise ValueError(
                    f"{name} is {tuple(rows.shape[1:])} {rows.dtype}, not as this cache holds it"
                )
            if name != _LENGTH and len(rows) != length:
                raise ValueError(f"{name} holds {len(rows)} tokens, and the sequence has {length}")
        return length

    def import_slot(self, state: Mapping[str, Tensor]) -> int:
        """Returns a new slot with what another cache exported.

        Raises:
            CacheFull: No slot is free, or the sequence is too long; nothing has changed.
            ValueError: It does not fit.
        """
        length = self.check_slot(state)
        if length > self.max_tokens:
            raise CacheFull(
                f"a sequence of {length} tokens does not fit: slots have room for {self.max_tokens}"
            )
        slot = self.allocate()
        for name, rows in state.items():
            if name != _LENGTH:
                store = self._store(name.removeprefix(f"{_VERSION}."), rows.shape[1:], rows.dtype)
                store[slot, :length] = rows.to(self.device)
        self._lengths[slot] = length
        return slot

    def _store(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self._stores:
            size = (self.max_sequences, self.max_tokens, *shape)
            self._stores[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return self._stores[name]
