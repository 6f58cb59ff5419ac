"""How packed tokens are laid out for kernels: no rows and no padding, a few numbers a token instead.

The window keys of a pass stand in one table, the main keys of a source in another; a token sees a range of
rows of the first and selects among a range of rows of the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import Batch
from model.layers.rope import cosine_and_sine

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [T, r / 2] float32."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The main keys of one ratio, all sequences after each other."""

    total: int
    begins: Tensor
    """[T] int32 first key row of each token's sequence."""
    ends: Tensor
    """[T] int32 one past the last key row a token sees."""
    starts: Tensor | None
    """[total] int32 packed index of each group's first token; None where keys come from a cache."""
    positions: Tensor | None
    """[total] position of each group's first token."""


class Flat:
    """The layout of one batch."""

    def __init__(self, batch: Batch, window: int) -> None:
        """Lay out `batch`, whose window has `window` tokens."""
        self.batch, self.window = batch, window
        self.position = batch.position
        self.device = self.position.device
        self.count = self.position.shape[0]
        self.cached = batch.rows[0].target is not None
        firsts = torch.cat([row.first for row in batch.rows])
        order = firsts.argsort()
        self._offsets = firsts[order]
        self._lengths = torch.cat([row.lengths for row in batch.rows])[order]
        self._starts = torch.cat([row.starts for row in batch.rows])[order]
        self._sequence = torch.repeat_interleave(
            torch.arange(len(firsts), device=self.device),
            self._lengths.to(self.device),
            output_size=self.count,
        )
        self._groups: dict[int, Groups] = {}
        self._angles: dict[int, Angles] = {}
        self._group_angles: dict[int, Angles] = {}
        self.ring_target: Tensor | None = None
        self.key_rows: dict[object, object] = {}
        """What kernels derive from a selection, shared by the layers that use it."""
        self._lay_out_window()

    def _lay_out_window(self) -> None:
        """Rows of the window table: packed tokens, or for cached sequences [held, new] a sequence."""
        row = self.batch.rows[0]
        column = self.position - self._starts.to(self.device)[self._sequence]
        if not self.cached:
            self.held, self.last = 0, None
            base = self._offsets.to(self.device)[self._sequence]
            self.window_rows = self.count
        else:
            self.held = row.held if bool((self._starts > 0).any()) else 0
            stride = self.held + row.length
            base = self._sequence * stride + self.held
            self.last = (base + column).int()
            self.window_rows = row.count * stride
            self.ring_target = self._ring_target()
        oldest = torch.zeros_like(self.position)
        if any(row.floors is not None for row in self.batch.rows):
            floors = [
                row.unpad(
                    (row.floors if row.floors is not None else row.position * 0).expand(row.count, row.length)
                )
                for row in self.batch.rows
            ]
            oldest = self.batch.merge_plain(floors)
        first = base + torch.maximum(oldest - (self.position - column), column * 0 - self.held)
        self.first = first.int()

    def _ring_target(self) -> Tensor:
        row = self.batch.rows[0]
        assert row.target is not None
        ring = row.ring(self._ring_entries())
        target = torch.full((self.count,), -1, dtype=torch.int64, device=self.device)
        return target.index_copy_(0, ring.source, ring.target)

    def _ring_entries(self) -> int:
        from model.rows import ring_size

        target = self.batch.rows[0].target
        assert target is not None
        return ring_size(self.window, target.slack)

    def groups(self, ratio: int) -> Groups:
        """Main keys of `ratio` tokens each."""
        if ratio not in self._groups:
            self._groups[ratio] = self._cached_groups(ratio) if self.cached else self._new_groups(ratio)
        return self._groups[ratio]

    def _new_groups(self, ratio: int) -> Groups:
        counts = self._lengths // ratio
        bases = counts.cumsum(0) - counts
        total = int(counts.sum())
        sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
        inside = (torch.arange(total) - bases[sequence]) * ratio
        begins = bases.to(self.device)[self._sequence]
        ends = begins + torch.div(self.position + 1, ratio, rounding_mode="floor")
        starts = (self._offsets[sequence] + inside).int().to(self.device)
        return Groups(total, begins.int(), ends.int(), starts, inside.to(self.device))

    def _cached_groups(self, ratio: int) -> Groups:
        row = self.batch.rows[0]
        width = row.width(ratio)
        begins = self._sequence * width
        ends = begins + torch.div(self.position + 1, ratio, rounding_mode="floor")
        return Groups(width * row.count, begins.int(), ends.int(), None, None)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, cached ones counted."""
        return int((self._starts + self._lengths).max())

    def sequences(self, ratio: int) -> list[tuple[int, int, int, int, int]]:
        """Of each sequence the range of its packed tokens, that of its keys, and the tokens before."""
        if self.cached:
            width = self.batch.rows[0].width(ratio)
            keys = [(at * width, (at + 1) * width) for at in range(len(self._offsets))]
        else:
            ends = (self._lengths // ratio).cumsum(0).tolist()
            keys = list(zip([0, *ends], ends, strict=False))
        tokens = zip(self._offsets.tolist(), (self._offsets + self._lengths).tolist(), strict=True)
        before = self._starts.tolist()
        return [(*t, *k, held) for t, k, held in zip(tokens, keys, before, strict=True) if k[1] > k[0]]

    def angles(self, ratio: int, frequencies: Tensor) -> Angles:
        """Of the tokens, in a layer of `ratio`."""
        kind = min(ratio, 1)
        if kind not in self._angles:
            self._angles[kind] = cosine_and_sine(self.position, frequencies)
        return self._angles[kind]

    def group_angles(self, ratio: int, frequencies: Tensor) -> Angles:
        """Of the groups computed in this pass."""
        if ratio not in self._group_angles:
            positions = self.groups(ratio).positions
            if positions is None:
                positions = self.batch.rows[0].groups(ratio).positions.flatten()
            self._group_angles[ratio] = cosine_and_sine(positions, frequencies)
        return self._group_angles[ratio]
