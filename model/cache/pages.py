"""Pages: memory of compressed keys in units of a fixed number of tokens, handed out on demand and shared.

A page stands for the same tokens in every layer that keeps compressed keys, so one table serves them all.
A fork takes a reference on its origin's pages and copies only the one it writes into. Page 0 is never handed
out: it stays zero and is what a sequence reads past its own end.

A page can be labelled with what it holds. A labelled page keeps its content when its last sequence leaves,
and a later sequence that begins with the same tokens lies down on it again, until the page is handed out for
something else. That takes no memory from anybody: such a page counts as free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch

NULL_PAGE = 0


class _Label(NamedTuple):
    name: bytes
    replay_start: int
    noted: float


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
        self._free = OrderedDict.fromkeys(range(1, pages + 1))
        self._labels: dict[int, _Label] = {}
        self._labelled: dict[bytes, int] = {}

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

    @property
    def labelled_pages(self) -> int:
        """Pages that can be found by what they hold."""
        return len(self._labels)

    def find(self, label: bytes) -> int | None:
        """The page that holds what `label` stands for, lain on or free."""
        return self._labelled.get(label)

    def label(self, page: int, label: bytes, replay_start: int, noted: float) -> None:
        """Say what `page`, which is full and lies on a sequence, holds. The first page of a label keeps it.

        Args:
            page: the page.
            label: stands for its content.
            replay_start: of the encoder, in force when the content was computed.
            noted: when the content was last known to be kept elsewhere too, in seconds.
        """
        assert self._references[page] > 0, f"page {page} is free"
        if (first := self._labelled.get(label)) is not None:
            self._labels[first] = self._labels[first]._replace(noted=noted)
        elif page not in self._labels:
            self._labels[page], self._labelled[label] = _Label(label, replay_start, noted), page

    def replay_start(self, page: int) -> int:
        """What was said of a labelled page."""
        return self._labels[page].replay_start

    def noted(self, label: bytes) -> float:
        """When what `label` stands for was last noted; minus infinity when no page holds it."""
        page = self._labelled.get(label)
        return -inf if page is None else self._labels[page].noted

    def taken(self, held: Sequence[int | None]) -> int:
        """Free pages that `lay` would take for a sequence on the pages `held`."""
        return sum(page is None or not self._references[page] for page in held)

    def lay(self, slot: int, held: Sequence[int | None]) -> list[int]:
        """Lay `slot`, which has no pages, on the pages `held`, or on a fresh one where that is None.

        Enough pages must be free. Returns the pages, in order.
        """
        assert not self._owned[slot], f"slot {slot} still has pages"
        for page in held:
            if page is not None:
                self._free.pop(page, None)
                self._references[page] += 1
        pages = [self._take() if page is None else page for page in held]
        self._owned[slot] = pages
        self.table[slot] = NULL_PAGE
        self.table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int64, device=self.table.device)
        return pages

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
            elif page is not None:
                self._unlabel(page)
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
        # The last page first: it is then the first to be handed out, and a shorter prefix stays findable.
        for page in reversed(self._owned[slot]):
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
        page, _ = self._free.popitem(last=False)
        self._unlabel(page)
        self._references[page] = 1
        return page

    def _drop(self, page: int) -> None:
        assert self._references[page] > 0, f"page {page} is free already"
        self._references[page] -= 1
        if not self._references[page]:
            self._free[page] = None
            # Pages nobody can find go first, labelled ones in the order they were left.
            self._free.move_to_end(page, last=page in self._labels)

    def _unlabel(self, page: int) -> None:
        if (labelled := self._labels.pop(page, None)) is not None:
            del self._labelled[labelled.name]
