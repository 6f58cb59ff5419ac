"""Pages: memory of compressed keys in units of a fixed number of tokens, handed out on demand and shared.

A page stands for the same tokens in every layer that keeps compressed keys, so one table serves them all.
A fork takes a reference on its origin's pages and copies only the one it writes into. Page 0 is never handed
out: it stays zero and is what a sequence reads past its own end.
"""

from __future__ import annotations

import torch

NULL_PAGE = 0


class PageTable:
    """Which pages each slot's sequence lies on, and how many sequences lie on each page."""

    def __init__(
        self, slots: int, pages_per_slot: int, pages: int, page_tokens: int, device: torch.device
    ) -> None:
        """Hand out `pages` pages of `page_tokens` tokens, besides the null page."""
        self.page_tokens = page_tokens
        self.table = torch.zeros(slots, pages_per_slot, dtype=torch.int64, device=device)
        """[slots, pages per slot] page numbers, the null page where a sequence has none."""
        self._owned: list[list[int]] = [[] for _ in range(slots)]
        self._references = [0] * (pages + 1)
        self._free = list(range(pages, NULL_PAGE, -1))

    @property
    def free_pages(self) -> int:
        """Pages that lie on no sequence."""
        return len(self._free)

    def owned(self, slot: int) -> tuple[int, ...]:
        """The pages of `slot`, in order."""
        return tuple(self._owned[slot])

    def references(self, page: int) -> int:
        """How many slots lie on `page`."""
        return self._references[page]

    def clear(self, slot: int) -> None:
        """Make `slot`, which has no pages, read the null page."""
        assert not self._owned[slot], f"slot {slot} still has pages"
        self.table[slot] = NULL_PAGE

    def missing(self, slots: list[int], lengths: list[int], new: list[int]) -> int:
        """Pages `reserve` would take for sequences of `lengths` tokens that each grow by some `new` ones."""
        total = 0
        left = dict[int, int]()
        for slot, length, more in zip(slots, lengths, new, strict=True):
            total += self._grown(slot, length + more)
            if (page := self._written(slot, length)) is not None:
                left[page] = left.get(page, self._references[page]) - 1
                total += left[page] > 0
        return total

    def reserve(self, slots: list[int], lengths: list[int], new: list[int]) -> list[tuple[int, int]]:
        """Give each slot pages of its own for `new` tokens after its `lengths`; enough must be free.

        Returns:
            (from, to) of pages whose content the caller has to copy before it writes.
        """
        copies = []
        for slot, length, more in zip(slots, lengths, new, strict=True):
            page = self._written(slot, length)
            if page is not None and self._references[page] > 1:
                copies.append((page, self._replace(slot, length // self.page_tokens)))
            if grown := self._grown(slot, length + more):
                self._append(slot, grown)
        return copies

    def share(self, source: int, target: int, length: int) -> None:
        """Lay `target`, which has no pages, on the pages that hold the first `length` tokens of `source`."""
        assert not self._owned[target], f"slot {target} still has pages"
        count = -(-length // self.page_tokens)
        shared = self._owned[source][:count]
        for page in shared:
            self._references[page] += 1
        self._owned[target] = shared
        self.table[target] = NULL_PAGE
        self.table[target, :count] = self.table[source, :count]

    def shrink(self, slot: int, length: int) -> None:
        """Take `slot` off the pages behind its first `length` tokens."""
        count = -(-length // self.page_tokens)
        for page in self._owned[slot][count:]:
            self._drop(page)
        del self._owned[slot][count:]
        self.table[slot, count:] = NULL_PAGE

    def release(self, slot: int) -> None:
        """Take `slot` off its pages; those without another sequence are free again."""
        for page in self._owned[slot]:
            self._drop(page)
        self._owned[slot] = []

    def _grown(self, slot: int, length: int) -> int:
        return max(0, -(-length // self.page_tokens) - len(self._owned[slot]))

    def _written(self, slot: int, length: int) -> int | None:
        """The page already owned that the next token goes to."""
        place = length // self.page_tokens
        return self._owned[slot][place] if place < len(self._owned[slot]) else None

    def _append(self, slot: int, count: int) -> None:
        begin = len(self._owned[slot])
        fresh = [self._take() for _ in range(count)]
        self._owned[slot] += fresh
        self.table[slot, begin : begin + count] = torch.tensor(fresh, device=self.table.device)

    def _replace(self, slot: int, place: int) -> int:
        fresh = self._take()
        self._drop(self._owned[slot][place])
        self._owned[slot][place] = fresh
        self.table[slot, place] = fresh
        return fresh

    def _take(self) -> int:
        assert self._free, "pages were not counted before they were taken"
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _drop(self, page: int) -> None:
        assert self._references[page] > 0, f"page {page} is free already"
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)
