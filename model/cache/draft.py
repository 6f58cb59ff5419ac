"""The drafter's window: keys made from the backbone's features of the last W tokens, a ring by position.

A sequence's window follows what the backbone has computed of it for good: a token that was only tried out
never enters, so nothing is ever taken back.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from model.cache.records import WINDOW
from model.config import PolicyConfig


class DraftWindow:
    """Rings [blocks, rows, W, ...] of `rows` sequences."""

    def __init__(
        self,
        config: PolicyConfig,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        storage: Literal["dense", "packed"] = "dense",
    ) -> None:
        """Set up empty windows; "packed" holds rounded keys as 8-bit records."""
        self.size, self._width, self._dtype = config.sliding_window, config.head_dim, dtype
        self._packed = storage == "packed"
        entry = self._width
        if self._packed:
            entry = WINDOW.code_bytes(self._width) + WINDOW.scale_bytes(self._width)
        shape = (config.num_nextn_predict_layers, rows, self.size, entry)
        self.storage = torch.zeros(shape, dtype=torch.uint8 if self._packed else dtype, device=device)
        self.next = torch.zeros(rows, dtype=torch.int64, device=device)
        """[rows] position that will be written next."""
        self.first = torch.zeros(rows, dtype=torch.int64, device=device)
        """[rows] first position since which no feature is missing."""

    def gather(self, rows: Tensor) -> Tensor:
        """[blocks, B, W, c] keys of `rows` [B]. An entry that `blocked` marks is undefined."""
        entries = self.storage.index_select(1, rows)
        if not self._packed:
            return entries
        codes, scales = entries[..., : self._width], entries[..., self._width :]
        return WINDOW.decode(codes.contiguous(), scales.contiguous(), self._dtype)

    def blocked(self, rows: Tensor) -> Tensor:
        """[B, W] true where a ring of `rows` [B] holds nothing."""
        last = self.next[rows][:, None] - 1
        entries = torch.arange(self.size, device=self.next.device)
        return last - (last - entries) % self.size < self.first[rows][:, None]

    def begin(self, rows: Tensor, starts: Tensor) -> None:
        """Say that `rows` [B] go on at positions `starts` [B]; a gap empties the window."""
        self.first[rows] = torch.where(starts == self.next[rows], self.first[rows], starts)
        self.next[rows] = starts

    def append(self, rows: Tensor, keys: Tensor, lengths: Tensor) -> None:
        """Write keys [blocks, B, L, c] of the next tokens, of which row b counts the first `lengths[b]`."""
        columns = torch.arange(keys.shape[2], device=keys.device)
        count = lengths[:, None]
        row, column = ((columns < count) & (columns >= count - self.size)).nonzero(as_tuple=True)
        places = (self.next[rows][row] + column) % self.size
        kept = keys[:, row, column]
        if self._packed:
            kept = torch.cat(WINDOW.encode(kept), dim=-1)
        self.storage[:, rows[row], places] = kept
        self.next[rows] += lengths

    def clear(self, row: int) -> None:
        """Empty one window."""
        self.next[row] = 0
        self.first[row] = 0

    def truncate(self, row: int, length: int) -> None:
        """Forget positions from `length` on; the oldest ones that they had overwritten are lost too."""
        end = int(self.next[row])
        if end > length:
            self.first[row] = max(int(self.first[row]), min(end - self.size, length))
            self.next[row] = length

    def copy(self, source: int, target: int) -> None:
        """Make window `target` equal to window `source`."""
        self.storage[:, target] = self.storage[:, source]
        self.next[target], self.first[target] = self.next[source], self.first[source]

    @property
    def nbytes(self) -> int:
        """Bytes of the rings."""
        return self.storage.nbytes
