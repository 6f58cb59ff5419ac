"""Sliding-window keys: a ring of entries a sequence and layer, entry = position mod entries.

A ring is longer than the window by the cache's slack, so that as many tokens can be taken back.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from model.cache.records import WINDOW
from model.rows import Rows


class WindowStorage(Protocol):
    """Keys of the last tokens of each sequence, in every layer."""

    storage: Tensor
    """[layers, slots, entries, ...]."""

    def gather(self, layer: int, rows: Rows) -> Tensor:
        """[B, W - 1, c] keys of the positions before the new tokens of `rows`, in order.

        Those below a row's floor are undefined.
        """
        ...

    def append(self, layer: int, rows: Rows, keys: Tensor) -> None:
        """Write packed `keys` [T, c] of the new tokens of `rows`; only the last of a row stay."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` equal to slot `source`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        ...


class WindowRing:
    """Keys as floats [layers, slots, entries, c]."""

    def __init__(
        self, layers: int, slots: int, entries: int, width: int, dtype: torch.dtype, device: torch.device
    ):
        self.storage = torch.zeros(layers, slots, entries, width, dtype=dtype, device=device)

    def gather(self, layer: int, rows: Rows) -> Tensor:
        """[B, W - 1, c] keys of the positions before the new tokens of `rows`, in order."""
        held = self.storage[layer].flatten(0, 1).index_select(0, rows.held_index)
        return held.unflatten(0, (rows.count, rows.held))

    def append(self, layer: int, rows: Rows, keys: Tensor) -> None:
        """Write packed `keys` [T, c] of the new tokens of `rows`; only the last of a row stay."""
        ring = rows.ring(self.storage.shape[2])
        self.storage[layer].flatten(0, 1).index_copy_(0, ring.target, keys.index_select(0, ring.source))

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` equal to slot `source`."""
        self.storage[:, target] = self.storage[:, source]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.storage.nbytes


class PackedWindowRing:
    """Keys as 8-bit records [layers, slots, entries, bytes]: codes of the channels, then their scales.

    Keys come rounded, and a rounded key finds a scale under which its record decodes to it again: a power of
    two may come out smaller the second time, never too small for the key's codes.
    """

    def __init__(
        self, layers: int, slots: int, entries: int, width: int, dtype: torch.dtype, device: torch.device
    ):
        self._width, self._dtype = width, dtype
        record_bytes = WINDOW.code_bytes(width) + WINDOW.scale_bytes(width)
        self.storage = torch.zeros(layers, slots, entries, record_bytes, dtype=torch.uint8, device=device)

    def gather(self, layer: int, rows: Rows) -> Tensor:
        """[B, W - 1, c] keys of the positions before the new tokens of `rows`, in order."""
        held = self.storage[layer].flatten(0, 1).index_select(0, rows.held_index)
        records = held.unflatten(0, (rows.count, rows.held))
        codes = records[..., : self._width].contiguous()
        return WINDOW.decode(codes, records[..., self._width :].contiguous(), self._dtype)

    def append(self, layer: int, rows: Rows, keys: Tensor) -> None:
        """Write packed `keys` [T, c] of the new tokens of `rows`; only the last of a row stay."""
        ring = rows.ring(self.storage.shape[2])
        records = torch.cat(WINDOW.encode(keys.index_select(0, ring.source)), dim=-1)
        self.storage[layer].flatten(0, 1).index_copy_(0, ring.target, records)

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` equal to slot `source`."""
        self.storage[:, target] = self.storage[:, source]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.storage.nbytes
