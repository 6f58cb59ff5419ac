"""How packed tokens are laid out as rows, so that attention runs as few large products.

Token-wise layers see packed tokens [T, ...]. Attention sees rows: one sequence each, new tokens only, padded
to the longest. A training document is a row that starts at position 0; a sequence being extended is a row
that starts where its cache ends. Everything attention needs to know about a call (positions, masks, groups,
where to write) is derived here once and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from model.layers.attend import as_bias
from model.layers.exact import fill
from model.layers.rope import Rotation


@dataclass(frozen=True, slots=True)
class CacheTarget:
    """The cached sequences that rows belong to."""

    slots: Tensor
    """[B] slot of each row."""
    capacity: int
    """Tokens one slot can hold."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The groups of `ratio` tokens that rows touch. Groups are aligned to position 0 of the sequence."""

    ratio: int
    width: int
    """Main keys each row can see at most, written before this call or by it."""
    source: Tensor | None
    """[B, G * ratio] index into [pending tokens of all rows, packed tokens]; None: packed tokens as is."""
    positions: Tensor
    """[B, G] first token of each group computed in this call."""
    visible: Tensor
    """[B, L] number of groups that end at or before each token."""
    closed: Tensor | None
    """[M] index into [B * G] of groups to be cached, and ..."""
    closed_at: Tensor | None
    """... [M] where: slot * groups per slot + group."""
    pending: Tensor | None
    """[B * ratio] index, as `source`, of the tokens of the group left open."""


class Rows:
    """A rectangle of B sequences with up to L new tokens each."""

    def __init__(
        self,
        starts: list[int],
        lengths: list[int],
        offsets: list[int],
        total: int,
        window: int,
        device: torch.device,
        target: CacheTarget | None = None,
    ) -> None:
        """Lay out rows whose new tokens stand at `offsets[b]` .. + `lengths[b]` of `total` packed ones."""
        self.count, self.length, self.window, self.device = len(starts), max(lengths), window, device
        self.target = target
        self.starts, self.lengths = torch.tensor(starts), torch.tensor(lengths)
        self.first = torch.tensor(offsets)
        uniform = min(lengths) == self.length
        self.is_view = uniform and total == self.count * self.length
        self.max_end = max(start + length for start, length in zip(starts, lengths, strict=True))
        self._columns = torch.arange(self.length)
        self._window_bias: Tensor | None = None
        self._groups: dict[int, GroupPlan] = {}
        self._rotations: dict[int, Rotation] = {}

    @cached_property
    def padded(self) -> Tensor:
        """[B, L] index of each new token among the packed ones (padding repeats the row's last)."""
        return (self.first[:, None] + torch.minimum(self._columns, self.lengths[:, None] - 1)).to(self.device)

    @cached_property
    def kept(self) -> Tensor:
        """[tokens of these rows] index into [B * L], without the padding, row after row."""
        return (self._columns < self.lengths[:, None]).flatten().nonzero().squeeze(1).to(self.device)

    @cached_property
    def real(self) -> Tensor:
        """[B, L] false on padding."""
        return (self._columns < self.lengths[:, None]).to(self.device)

    @cached_property
    def position(self) -> Tensor:
        """[B, L] position of each new token in its sequence (padding counts on)."""
        return (self.starts[:, None] + self._columns).to(self.device)

    @cached_property
    def last(self) -> Tensor:
        """[B] packed index of each row's last new token."""
        return (self.first + self.lengths - 1).to(self.device)

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] packed to [B, L, ...]."""
        if self.is_view:
            return x[: self.count * self.length].unflatten(0, (self.count, self.length))
        return x.index_select(0, self.padded.flatten()).unflatten(0, (self.count, self.length))

    def unpad(self, x: Tensor) -> Tensor:
        """[B, L, ...] to packed, these rows' tokens only."""
        flat = x.flatten(0, 1)
        return flat if self.is_view else flat.index_select(0, self.kept)

    @cached_property
    def window_blocked(self) -> Tensor:
        """[B or 1, L, R + L]: which of [ring, new tokens] a token may not see. R is 0 without a cache."""
        if self.target is None:
            distance = self._columns[:, None] - self._columns
            return ((distance < 0) | (distance >= self.window)).unsqueeze(0).to(self.device)
        slot = torch.arange(self.window)
        last = self.starts[:, None] - 1
        ring = last - (last - slot) % self.window
        keys = torch.cat([ring, self.starts[:, None] + self._columns], dim=1).unsqueeze(1)
        queries = (self.starts[:, None] + self._columns).unsqueeze(2)
        blocked = (keys < 0) | (keys > queries) | (keys <= queries - self.window)
        return blocked.to(self.device)

    def window_bias(self, dtype: torch.dtype) -> Tensor:
        """`window_blocked` as 0 and -inf."""
        if self._window_bias is None:
            self._window_bias = as_bias(self.window_blocked, dtype)
        return self._window_bias

    def window_index(self, begin: int, end: int) -> Tensor:
        """[B, end - begin, W] index into [ring, new tokens] of each window; -1 before the sequence."""
        queries = self.position[:, begin:end].unsqueeze(2)
        keys = queries - torch.arange(self.window - 1, -1, -1, device=self.device)
        starts = self.starts.to(self.device)[:, None, None]
        ring = 0 if self.target is None else self.window
        index = torch.where(keys >= starts, keys - starts + ring, keys % self.window)
        return index.masked_fill_(keys < 0, -1)

    @cached_property
    def ring_source(self) -> Tensor:
        """[M] packed index of the tokens that stay in the window ring, and ..."""
        return self.padded.flatten()[self._ring_columns]

    @cached_property
    def ring_target(self) -> Tensor:
        """... [M] where: slot * W + position mod W."""
        assert self.target is not None
        ring = self.target.slots[:, None] * self.window + self.position % self.window
        return ring.flatten()[self._ring_columns]

    @cached_property
    def _ring_columns(self) -> Tensor:
        lengths = self.lengths[:, None]
        stays = (self._columns < lengths) & (self._columns >= lengths - self.window)
        return stays.flatten().nonzero().squeeze(1).to(self.device)

    def groups(self, ratio: int) -> GroupPlan:
        """The plan for groups of `ratio` tokens."""
        if ratio not in self._groups:
            self._groups[ratio] = self._plan(ratio)
        return self._groups[ratio]

    def group_rotation(self, ratio: int, frequencies: Tensor) -> Rotation:
        """[B * G, r / 2] rotation of each group, at its first token."""
        if ratio not in self._rotations:
            self._rotations[ratio] = Rotation.at(fill(self.groups(ratio).positions.flatten()), frequencies)
        return self._rotations[ratio]

    def _plan(self, ratio: int) -> GroupPlan:
        first = self.starts // ratio
        shift = self.starts - first * ratio
        count = -(-(int(shift.max()) + self.length) // ratio)
        slots = torch.arange(count * ratio)
        tokens = slots - shift[:, None]
        aligned = self.first[:, None] + torch.minimum(tokens.clamp_min(0), self.lengths[:, None] - 1)
        visible = (self.position + 1) // ratio
        positions = ((first[:, None] + torch.arange(count)) * ratio).to(self.device)
        if self.target is None:
            source = None if self.is_view and self.length % ratio == 0 else aligned.to(self.device)
            return GroupPlan(ratio, count, source, positions, visible, None, None, None)
        held = torch.arange(self.count)[:, None] * ratio + slots % ratio
        source = torch.where(tokens < 0, held, self.count * ratio + aligned)
        ends = (self.starts + self.lengths) // ratio
        groups = first[:, None] + torch.arange(count)
        closed = (groups < ends[:, None]).flatten().nonzero().squeeze(1)
        per_slot = -(-self.target.capacity // ratio)
        closed_at = self.target.slots[:, None] * per_slot + groups.to(self.device)
        open_slots = ((ends - first)[:, None] * ratio + torch.arange(ratio)).clamp_max(count * ratio - 1)
        return GroupPlan(
            ratio,
            self.max_end // ratio,
            source.to(self.device),
            positions,
            visible,
            closed.to(self.device),
            closed_at.flatten()[closed.to(self.device)],
            source.gather(1, open_slots).flatten().to(self.device),
        )
