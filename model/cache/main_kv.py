"""Compressed keys: one entry a group of tokens, written once when the group closes, read by later layers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from model.rows import GroupPlan


class KeySource(Protocol):
    """Keys of B sequences that attention can read whole or by index."""

    def dense(self) -> Tensor:
        """All keys, [B, S, c]."""
        ...

    def take(self, index: Tensor) -> Tensor:
        """[B, C, K] indices (negative: anything) to [B, C, K, c]."""
        ...


def _take(flat: Tensor, base: Tensor, index: Tensor) -> Tensor:
    rows = base[:, None, None] + index.clamp_min(0)
    return flat.index_select(0, rows.flatten()).unflatten(0, index.shape)


class TensorKeys:
    """Keys [B, S, c] computed in this call."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys

    def dense(self) -> Tensor:
        """All keys, [B, S, c]."""
        return self._keys

    def take(self, index: Tensor) -> Tensor:
        """[B, C, K] indices (negative: anything) to [B, C, K, c]."""
        count, width = self._keys.shape[:2]
        base = torch.arange(count, device=index.device) * width
        return _take(self._keys.flatten(0, 1), base, index)


class CachedKeys:
    """The first `width` keys of some slots of a cache; read whole, they are gathered once."""

    def __init__(self, storage: Tensor, slots: Tensor, width: int) -> None:
        self._storage, self._slots, self._width = storage, slots, width
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """All keys, [B, S, c]."""
        if self._dense is None:
            self._dense = self._storage[:, : self._width].index_select(0, self._slots)
        return self._dense

    def take(self, index: Tensor) -> Tensor:
        """[B, C, K] indices (negative: anything) to [B, C, K, c]."""
        return _take(self._storage.flatten(0, 1), self._slots * self._storage.shape[1], index)


class GroupCache:
    """One layer's entries [slots, groups, c], for main keys or index keys."""

    def __init__(self, slots: int, groups: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = torch.zeros(slots, groups, width, dtype=dtype, device=device)

    def append(self, plan: GroupPlan, entries: Tensor) -> None:
        """Write those of `entries` [B, G, c] whose group closed in this call."""
        assert plan.closed is not None and plan.closed_at is not None
        closed = entries.flatten(0, 1).index_select(0, plan.closed)
        self.storage.flatten(0, 1).index_copy_(0, plan.closed_at, closed)

    def gather(self, slots: Tensor, width: int) -> CachedKeys:
        """The first `width` entries of each of `slots`."""
        return CachedKeys(self.storage, slots, width)

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` equal to slot `source`."""
        self.storage[target] = self.storage[source]
