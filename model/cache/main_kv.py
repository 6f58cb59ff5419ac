"""Compressed keys: one entry a group of tokens, written once when the group closes, read by later layers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from model.cache.pages import PageTable
from model.cache.records import RecordFormat
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


class GroupStorage(Protocol):
    """One layer's entries of all sequences, for main keys or index keys."""

    storage: Tensor
    """The buffer."""

    def append(self, plan: GroupPlan, entries: Tensor, rounded: Tensor) -> None:
        """Write those entries [B, G, c] whose group closed in this call.

        Args:
            plan: the groups.
            entries: before rounding.
            rounded: as this pass sees them; the same tensor where it does not round.
        """
        ...

    def gather(self, slots: Tensor, width: int) -> KeySource:
        """The first `width` entries of each of `slots`."""
        ...

    def slot_shape(self, groups: int) -> tuple[int, ...]:
        """Of what `read_slot` gives."""
        ...

    def read_slot(self, slot: int, groups: int) -> Tensor:
        """The first `groups` entries of `slot` as they are stored."""
        ...

    def write_slot(self, slot: int, value: Tensor) -> None:
        """Put back what `read_slot` gave; the slot has the room."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        ...


class GroupCache:
    """Entries as floats [slots, groups, c], as the pass saw them."""

    def __init__(self, slots: int, groups: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = torch.zeros(slots, groups, width, dtype=dtype, device=device)

    def append(self, plan: GroupPlan, entries: Tensor, rounded: Tensor) -> None:
        """Write those of `rounded` [B, G, c] whose group closed in this call."""
        assert plan.closed is not None and plan.closed_at is not None
        closed = rounded.flatten(0, 1).index_select(0, plan.closed)
        self.storage.flatten(0, 1).index_copy_(0, plan.closed_at, closed)

    def gather(self, slots: Tensor, width: int) -> CachedKeys:
        """The first `width` entries of each of `slots`."""
        return CachedKeys(self.storage, slots, width)

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` equal to slot `source`."""
        self.storage[target] = self.storage[source]

    def slot_shape(self, groups: int) -> tuple[int, ...]:
        """Of what `read_slot` gives."""
        return groups, self.storage.shape[2]

    def read_slot(self, slot: int, groups: int) -> Tensor:
        """The first `groups` entries of `slot`, [groups, c]."""
        return self.storage[slot, :groups]

    def write_slot(self, slot: int, value: Tensor) -> None:
        """Put back what `read_slot` gave."""
        self.storage[slot, : value.shape[0]] = value

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.storage.nbytes


class PackedKeys:
    """The first `width` keys of some slots of a packed cache; read whole, they are decoded once."""

    def __init__(self, storage: PackedGroupCache, rows: Tensor, width: int) -> None:
        self._storage, self._rows, self._width = storage, rows, width
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """All keys, [B, S, c]."""
        if self._dense is None:
            self._dense = self._storage.read_pages(self._rows, self._width)
        return self._dense

    def take(self, index: Tensor) -> Tensor:
        """[B, C, K] indices (negative: anything) to [B, C, K, c]."""
        return self._storage.read(self._rows, index.clamp_min(0))


class PackedGroupCache:
    """Entries as records on pages: in a page all codes come first, then all scales."""

    def __init__(
        self,
        pages: PageTable,
        page_count: int,
        groups: tuple[int, int],
        width: int,
        record: RecordFormat,
        dtype: torch.dtype,
    ) -> None:
        """Lay out `page_count` pages; `groups` are those of a page, and those that fit in a slot."""
        self._pages, self._record, self._dtype = pages, record, dtype
        self._page_groups, self._slot_groups = groups
        codes, scales = record.code_bytes(width), record.scale_bytes(width)
        split = self._page_groups * codes
        shape = (page_count, self._page_groups * (codes + scales))
        self.storage = torch.zeros(shape, dtype=torch.uint8, device=pages.table.device)
        self._codes = self.storage[:, :split].unflatten(1, (self._page_groups, codes))
        self._scales = self.storage[:, split:].unflatten(1, (self._page_groups, scales))

    def append(self, plan: GroupPlan, entries: Tensor, rounded: Tensor) -> None:
        """Write the records of those of `entries` [B, G, c] whose group closed in this call."""
        assert plan.closed is not None and plan.closed_at is not None
        if not plan.closed.numel():
            return
        codes, scales = self._record.encode(entries.flatten(0, 1).index_select(0, plan.closed))
        slots = torch.div(plan.closed_at, self._slot_groups, rounding_mode="floor")
        group = plan.closed_at % self._slot_groups
        place = torch.div(group, self._page_groups, rounding_mode="floor")
        where = (self._pages.table[slots, place], group % self._page_groups)
        self._codes.index_put_(where, codes)
        self._scales.index_put_(where, scales)

    def gather(self, slots: Tensor, width: int) -> PackedKeys:
        """The first `width` entries of each of `slots`."""
        return PackedKeys(self, self._pages.table.index_select(0, slots), width)

    def read_pages(self, rows: Tensor, width: int) -> Tensor:
        """[B, width, c] the first entries of sequences that lie on the pages `rows` [B, pages]."""
        count = -(-width // self._page_groups)
        pages = self.storage.index_select(0, rows[:, :count].flatten())
        code_bytes, scale_bytes = self._codes.shape[2], self._scales.shape[2]
        split = self._page_groups * code_bytes
        shape = (rows.shape[0], count * self._page_groups)
        codes = pages[:, :split].reshape(*shape, code_bytes)[:, :width]
        scales = pages[:, split:].reshape(*shape, scale_bytes)[:, :width]
        return self._record.decode(codes, scales, self._dtype)

    def read(self, rows: Tensor, index: Tensor) -> Tensor:
        """[B, C, K] entry numbers to [B, C, K, c]."""
        place = torch.div(index, self._page_groups, rounding_mode="floor")
        pages = rows.gather(1, place.flatten(1)).view_as(index)
        where = (pages, index % self._page_groups)
        return self._record.decode(self._codes[where], self._scales[where], self._dtype)

    def slot_shape(self, groups: int) -> tuple[int, ...]:
        """Of what `read_slot` gives."""
        return -(-groups // self._page_groups), self.storage.shape[1]

    def read_slot(self, slot: int, groups: int) -> Tensor:
        """The pages with the first `groups` entries of `slot`, [pages, bytes]."""
        return self.storage.index_select(0, self._pages.table[slot, : self.slot_shape(groups)[0]])

    def write_slot(self, slot: int, value: Tensor) -> None:
        """Put back what `read_slot` gave; the slot owns the pages."""
        self.storage.index_copy_(0, self._pages.table[slot, : value.shape[0]], value)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Make pages `target` [n] equal to pages `source` [n]."""
        self.storage.index_copy_(0, target, self.storage.index_select(0, source))

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return self.storage.nbytes
