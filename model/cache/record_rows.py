"""Compressed keys as whole records in rows, the form that kernels gather from.

Pages and bytes are those of `PackedGroupCache`; only the order inside a page differs: a record lies in one
piece, and its codes in halves (`model.ops.records`), so that a kernel reads a key in one go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.cache.main_kv import PackedGroupCache, PackedKeys
from model.ops.records import pack, unpack
from model.rows import GroupPlan


class RecordRows(PackedGroupCache):
    """Entries as records [rows, bytes]; row = page * groups of a page + group in the page."""

    @property
    def records(self) -> Tensor:
        """[rows, bytes] uint8 of all pages."""
        return self.storage.view(-1, self.storage.shape[1] // self._page_groups)

    @property
    def page_groups(self) -> int:
        """Records on a page."""
        return self._page_groups

    def rows_at(self, slots: Tensor, groups: Tensor) -> Tensor:
        """Rows of the entries `groups` of the sequences in `slots`, shapes alike."""
        pages = self._pages.table[slots, torch.div(groups, self._page_groups, rounding_mode="floor")]
        return pages * self._page_groups + groups % self._page_groups

    def write(self, plan: GroupPlan, records: Tensor) -> None:
        """Write those of `records` [B * G, bytes] whose group closed in this call."""
        assert plan.closed is not None and plan.closed_at is not None
        if plan.closed.numel():
            slots = torch.div(plan.closed_at, self._slot_groups, rounding_mode="floor")
            rows = self.rows_at(slots, plan.closed_at % self._slot_groups)
            self.records.index_copy_(0, rows, records.index_select(0, plan.closed))

    def append(self, plan: GroupPlan, entries: Tensor, rounded: Tensor) -> None:
        """Write the records of those of `entries` [B, G, c] whose group closed in this call."""
        self.write(plan, pack(self._record.name, entries.flatten(0, 1)))

    def read_pages(self, rows: Tensor, width: int) -> Tensor:
        """[B, width, c] the first entries of sequences that lie on the pages `rows` [B, pages]."""
        return unpack(self._record.name, self.first_records(rows, width)).to(self._dtype)

    def first_records(self, rows: Tensor, width: int) -> Tensor:
        """[B, width, bytes] records of the first entries of sequences on the pages `rows` [B, pages]."""
        count = -(-width // self._page_groups)
        pages = self.storage.index_select(0, rows[:, :count].flatten())
        return pages.view(rows.shape[0], count * self._page_groups, -1)[:, :width]

    def read(self, rows: Tensor, index: Tensor) -> Tensor:
        """[B, C, K] entry numbers to [B, C, K, c]."""
        place = torch.div(index, self._page_groups, rounding_mode="floor")
        pages = rows.gather(1, place.flatten(1)).view_as(index)
        found = self.records[pages * self._page_groups + index % self._page_groups]
        return unpack(self._record.name, found).to(self._dtype)

    def gather(self, slots: Tensor, width: int) -> PackedKeys:
        """The first `width` entries of each of `slots`."""
        return RecordKeys(self, self._pages.table.index_select(0, slots), width)


class RecordKeys(PackedKeys):
    """Keys of some slots that kernels read as records."""

    @property
    def storage(self) -> RecordRows:
        """Where they lie."""
        assert isinstance(self._storage, RecordRows)
        return self._storage

    def records(self) -> Tensor:
        """[B * width, bytes], sequence after sequence."""
        return self.storage.first_records(self._rows, self._width).flatten(0, 1)
