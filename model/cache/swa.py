"""Sliding-window keys: a ring of W entries a sequence and layer, entry = position mod W."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from model.cache.records import WINDOW
from model.rows import Rows


class WindowStorage(Protocol):
    """Keys of the last W tokens of each sequence, in every layer."""

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """[B, W, c] rings of `slots`. An entry the sequence has not reached yet is undefined."""
        ...

    def append(self, layer: int, rows: Rows, keys: Tensor) -> None:
        """Write packed `keys` [T, c] of the new tokens of `rows`; only the last W of a row stay."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` equal to slot `source`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        ...


class WindowRing:
    """Keys as floats [layers, slots, W, c]."""

    def __init__(
        self, layers: int, slots: int, window: int, width: int, dtype: torch.dtype, device: torch.device
    ):
        self.storage = torch.zeros(layers, slots, window, width, dtype=dtype, device=device)

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """[B, W, c] rings of `slots`. An entry the sequence has not reached yet is undefined."""
        return self.storage[layer].index_select(0, slots)

    def append(self, layer: int, rows: Rows, keys: Tensor) -> None:
        """Write packed `keys` [T, c] of the new tokens of `rows`; only the last W of a row stay."""
        self.storage[layer].flatten(0, 1).index_copy_(
            0, rows.ring_target, keys.index_select(0, rows.ring_source)
        )

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` equal to slot `source`."""
        self.storage[:, target] = self.storage[:, source]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.storage.nbytes


class PackedWindowRing:
    """Keys as 8-bit records [layers, slots, W, bytes]: codes of the channels, then their scales.

    Keys come rounded, and a rounded key finds a scale under which its record decodes to it again: a power of
    two may come out smaller the second time, never too small for the key's codes.
    """

    def __init__(
        self, layers: int, slots: int, window: int, width: int, dtype: torch.dtype, device: torch.device
    ):
        self._width, self._dtype = width, dtype
        record_bytes = WINDOW.code_bytes(width) + WINDOW.scale_bytes(width)
        self.storage = torch.zeros(layers, slots, window, record_bytes, dtype=torch.uint8, device=device)

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """[B, W, c] rings of `slots`. An entry the sequence has not reached yet is undefined."""
        records = self.storage[layer].index_select(0, slots)
        codes = records[..., : self._width].contiguous()
        return WINDOW.decode(codes, records[..., self._width :].contiguous(), self._dtype)

    def append(self, layer: int, rows: Rows, keys: Tensor) -> None:
        """Write packed `keys` [T, c] of the new tokens of `rows`; only the last W of a row stay."""
        records = torch.cat(WINDOW.encode(keys.index_select(0, rows.ring_source)), dim=-1)
        self.storage[layer].flatten(0, 1).index_copy_(0, rows.ring_target, records)

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` equal to slot `source`."""
        self.storage[:, target] = self.storage[:, source]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.storage.nbytes
