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
    slack: int
    """Entries that rings hold beyond what the next token needs."""

    def pending_size(self, ratio: int) -> int:
        """Entries of the ring of tokens that may belong to an open group of `ratio` tokens."""
        return ring_size(ratio - 1, self.slack, ratio)


def ring_size(needed: int, slack: int, multiple: int = 1) -> int:
    """Entries of a ring that holds the last `needed` ones even after `slack` more were written and undone."""
    return -(-(needed + slack) // multiple) * multiple


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The groups of `ratio` tokens that rows touch. Groups are aligned to position 0 of the sequence."""

    ratio: int
    source: Tensor | None
    """[B, G * ratio] index into [pending tokens of all rows, packed tokens]; None: packed tokens as is."""
    positions: Tensor
    """[B, G] first token of each group computed in this call."""
    closed: Tensor | None
    """[M] index into [B * G] of groups to be cached, and ..."""
    closed_at: Tensor | None
    """... [M] where: slot * groups per slot + group."""
    pending: Tensor | None
    """[B * ratio] where the tokens of each row's open group wait: slot * ring + position mod ring."""


@dataclass(frozen=True, slots=True)
class RingWrite:
    """What goes into a ring of some number of entries a slot."""

    source: Tensor
    """[M] packed index of the tokens that stay in the ring, and ..."""
    target: Tensor
    """... [M] where: slot * entries + position mod entries."""


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
        counted: list[int] | None = None,
    ) -> None:
        """Lay out rows whose new tokens stand at `offsets[b]` .. + `lengths[b]` of `total` packed ones.

        The first `counted[b]` tokens of a row are in its cache's compressed keys already.
        """
        self.count, self.length, self.window, self.device = len(starts), max(lengths), window, device
        self.target = target
        self.starts, self.lengths = torch.tensor(starts), torch.tensor(lengths)
        self.first = torch.tensor(offsets)
        self.counted = torch.tensor(counted) if counted and any(counted) else None
        self.floors: Tensor | None = None
        """[B, L or 1] first position whose window keys a token may see; None: all of its window."""
        uniform = min(lengths) == self.length
        self.is_view = uniform and total == self.count * self.length
        self.max_end = max(start + length for start, length in zip(starts, lengths, strict=True))
        self.held = 0 if target is None else window - 1
        """Window keys of each row that come from its cache and stand before the new ones."""
        self._columns = torch.arange(self.length)
        self._window_bias: Tensor | None = None
        self._groups: dict[int, GroupPlan] = {}
        self._visible: dict[int, Tensor] = {}
        self._rings: dict[int, RingWrite] = {}
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
        """[B or 1, L, held + L]: which of [held, new] window keys a token may not see."""
        offsets = torch.arange(-self.held, self.length)
        distance = self._columns[:, None] - offsets
        blocked = ((distance < 0) | (distance >= self.window)).unsqueeze(0).to(self.device)
        if self.floors is None and not self.held:
            return blocked
        keys = (self.starts[:, None] + offsets).unsqueeze(1).to(self.device)
        floors = keys.new_zeros(1, 1) if self.floors is None else self.floors
        return blocked | (keys < floors.unsqueeze(-1))

    def window_bias(self, dtype: torch.dtype) -> Tensor:
        """`window_blocked` as 0 and -inf."""
        if self._window_bias is None:
            self._window_bias = as_bias(self.window_blocked, dtype)
        return self._window_bias

    def window_index(self, begin: int, end: int) -> Tensor:
        """[B, end - begin, W] index into [held, new] keys of each window; -1 where it has no key."""
        queries = self.position[:, begin:end].unsqueeze(2)
        keys = queries - torch.arange(self.window - 1, -1, -1, device=self.device)
        floors = 0
        if self.floors is not None:
            floors = (self.floors if self.floors.shape[1] == 1 else self.floors[:, begin:end]).unsqueeze(-1)
        index = keys - (self.starts.to(self.device)[:, None, None] - self.held)
        return index.masked_fill_(keys < floors, -1)

    @cached_property
    def held_index(self) -> Tensor:
        """[B * held] where the held window keys lie, by position: slot * entries + position mod entries."""
        assert self.target is not None
        entries = ring_size(self.window, self.target.slack)
        before = (self.starts[:, None] + torch.arange(-self.held, 0)) % entries
        return (self.target.slots[:, None] * entries + before.to(self.device)).flatten()

    def ring(self, entries: int) -> RingWrite:
        """How the new tokens go into a ring of `entries` a slot: the last ones of each row stay."""
        if entries not in self._rings:
            assert self.target is not None
            target = self.target.slots[:, None] * entries + self.position % entries
            if self.length <= entries and self.is_view:
                source = torch.arange(self.count * self.length, device=self.device)
                self._rings[entries] = RingWrite(source, target.flatten())
            else:
                lengths = self.lengths[:, None]
                stays = (self._columns < lengths) & (self._columns >= lengths - entries)
                kept = stays.flatten().nonzero().squeeze(1).to(self.device)
                self._rings[entries] = RingWrite(self.padded.flatten()[kept], target.flatten()[kept])
        return self._rings[entries]

    def visible(self, ratio: int) -> Tensor:
        """[B, L] number of groups of `ratio` tokens that end at or before each token."""
        if ratio not in self._visible:
            self._visible[ratio] = (self.position + 1) // ratio
        return self._visible[ratio]

    def width(self, ratio: int) -> int:
        """Main keys each row can see at most, written before this call or by it."""
        return self.max_end // ratio

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
        positions = ((first[:, None] + torch.arange(count)) * ratio).to(self.device)
        if self.target is None:
            source = None if self.is_view and self.length % ratio == 0 else aligned.to(self.device)
            return GroupPlan(ratio, source, positions, None, None, None)
        waiting = torch.arange(self.count)[:, None] * ratio + slots % ratio
        source = torch.where(tokens < 0, waiting, self.count * ratio + aligned)
        groups = first[:, None] + torch.arange(count)
        closes = groups < ((self.starts + self.lengths) // ratio)[:, None]
        if self.counted is not None:
            closes &= groups * ratio >= torch.where(self.counted > 0, self.starts + self.counted, 0)[:, None]
        closed = closes.flatten().nonzero().squeeze(1)
        per_slot = -(-self.target.capacity // ratio)
        closed_at = self.target.slots[:, None] * per_slot + groups.to(self.device)
        entries = self.target.pending_size(ratio)
        open_tokens = (first[:, None] * ratio + torch.arange(ratio)) % entries
        return GroupPlan(
            ratio,
            source.to(self.device),
            positions,
            closed.to(self.device),
            closed_at.flatten()[closed.to(self.device)],
            (self.target.slots[:, None] * entries + open_tokens.to(self.device)).flatten(),
        )
