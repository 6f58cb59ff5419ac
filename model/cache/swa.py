"""Sliding-window keys: a ring of W entries a sequence and layer, entry = position mod W."""

from __future__ import annotations

import torch
from torch import Tensor

from model.rows import Rows


class WindowRing:
    """Keys [layers, slots, W, c] of the last W tokens of each sequence."""

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
