"""All state of the sequences an engine holds, by slot: allocate, extend through the policy, fork, free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Literal, get_args

import torch
from torch import Tensor

from model.cache.draft import DraftWindow
from model.cache.main_kv import GroupCache, GroupStorage, PackedGroupCache
from model.cache.pages import PageTable
from model.cache.progress import Progress, Span
from model.cache.record_rows import RecordRows
from model.cache.records import INDEX, MAIN
from model.cache.swa import PackedWindowRing, WindowRing, WindowStorage
from model.cache.transfer import check_slot, export_slot, import_slot
from model.config import PolicyConfig
from model.ops.dispatch import rows_of_records
from model.rows import CacheTarget, ring_size

Storage = Literal["dense", "packed"]
"""Keys as floats, a fixed place a slot; or as 4- and 8-bit records, compressed keys on pages."""

SLACK = 8
"""Tokens that can be taken back unless a cache is made with another number."""
_PAGE_TOKENS = 64


def tokens_of_page(config: PolicyConfig) -> int:
    """Tokens of a page: whole groups of every layer."""
    whole = lcm(*(config.ratio(layer) for layer in config.kv_source_layer_ids))
    return -(-_PAGE_TOKENS // whole) * whole


class CacheFull(ValueError):
    """No slot or page is free, or a sequence would outgrow its slot."""


class PolicyCache:
    """Storage for `max_sequences` sequences of up to `max_tokens` tokens each."""

    def __init__(
        self,
        config: PolicyConfig,
        max_sequences: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        storage: Storage = "dense",
        pages: int | None = None,
        slack: int = SLACK,
    ) -> None:
        """Set up empty storage.

        Args:
            config: gives all widths.
            max_sequences: slots.
            max_tokens: longest sequence.
            dtype: of keys as attention reads them.
            device: of the buffers.
            storage: "packed" holds rounded keys and is for passes with `fake_quant` alone.
            pages: packed only: pages of compressed keys; None: as many as full slots can need.
            slack: how many tokens `truncate` can take back.

        Raises:
            ValueError: a size below 1, an unknown storage, or `pages` without packed storage.
        """
        if max_sequences < 1 or max_tokens < 1 or slack < 0:
            raise ValueError(
                f"a cache needs room: got max_sequences {max_sequences}, max_tokens {max_tokens}, "
                f"slack {slack}"
            )
        if storage not in get_args(Storage):
            raise ValueError(
                f"unknown cache storage {storage!r}: choose one of {', '.join(get_args(Storage))}"
            )
        if pages is not None and (storage == "dense" or pages < 1):
            raise ValueError(
                f"pages must be at least 1 and belong to packed storage: got {pages} with {storage!r}"
            )
        self.max_sequences, self.max_tokens, self.slack = max_sequences, max_tokens, slack
        self.device, self.storage = device, storage
        self.ratios = {layer: config.ratio(layer) for layer in config.kv_source_layer_ids}
        """Tokens of a compressed key, by the layer that owns it."""
        self.whole_groups = lcm(*self.ratios.values())
        """Compressed keys alone can stand for a multiple of so many tokens: no group is open there."""
        ring = WindowRing if storage == "dense" else PackedWindowRing
        entries = ring_size(config.sliding_window, slack)
        self.windows: WindowStorage = ring(
            config.num_hidden_layers, max_sequences, entries, config.head_dim, dtype, device
        )
        self.main: dict[int, GroupStorage] = {}
        self.index_keys: dict[int, GroupStorage] = {}
        self.pages: PageTable | None = None
        if storage == "dense":
            self._lay_out_dense(config, dtype)
        else:
            self._lay_out_pages(config, dtype, pages)
        self.pending = self._open_groups(config)
        self.draft: DraftWindow | None = None
        """What the drafter keeps; whoever drafts writes it."""
        if config.num_nextn_predict_layers:
            self.draft = DraftWindow(config, max_sequences, dtype, device, storage)
        self.reach = max(config.engram_max_ngram_size - 1, 0)
        """How many ids before a token its n-grams look back to."""
        entries = ring_size(self.reach, slack)
        self.tail = torch.zeros(max_sequences, entries, dtype=torch.int64, device=device)
        """[slots, entries] compressed ids of each sequence's last tokens, entry = position mod entries."""
        self.step_graphs: object | None = None
        """What `model.decode_graphs` captured over this cache; gone with it."""
        self._progress: list[Progress | None] = [None] * max_sequences
        self._free = list(range(max_sequences - 1, -1, -1))

    def allocate(self) -> int:
        """A slot with an empty sequence. Raises CacheFull when none is free."""
        if not self._free:
            raise CacheFull(f"all {self.max_sequences} slots are taken: free one, or make the cache larger")
        slot = self._free.pop()
        self._progress[slot] = Progress()
        if self.draft is not None:
            self.draft.clear(slot)
        if self.pages is not None:
            self.pages.clear(slot)
        return slot

    def adopt(
        self,
        length: int,
        resume: int | None = None,
        tail_ids: Tensor | None = None,
        held: Sequence[int | None] | None = None,
    ) -> int:
        """A slot for a sequence of which the caller has the compressed keys alone.

        Its windows are lost. The tokens from `resume` on have to be given to `extend` again: those before
        `length` then write window keys and leave the compressed keys alone, and the encoder sees no window
        key before `resume`. The caller fills the compressed keys in (on packed storage the pages are there).

        Args:
            length: tokens whose compressed keys there are, a multiple of `whole_groups`.
            resume: first token that will be run again; None: `length`, no replay.
            tail_ids: compressed ids (`Policy.look_back_ids`) of the tokens before `resume`, the last of them
                last; at least `reach` where there are as many.
            held: see `take_over`.

        Raises:
            CacheFull: no slot is free, the sequence does not fit, or pages run out.
            ValueError: `length`, `resume` or `tail_ids` do not fit together.
        """
        resume = length if resume is None else resume
        known = 0 if tail_ids is None else tail_ids.shape[0]
        if length < 1 or length % self.whole_groups or not 0 <= resume <= length:
            raise ValueError(
                f"compressed keys alone stand for a multiple of {self.whole_groups} tokens and are resumed "
                f"inside them: got length {length}, resume {resume}"
            )
        if known < min(self.reach, resume):
            raise ValueError(
                f"n-grams look back {self.reach} tokens from position {resume}: give tail_ids of the tokens "
                f"before it, got {known}"
            )
        progress = Progress(length=length, encoded=resume, floor=resume, peak=length, base=length)
        slot = self.take_over(progress, held)
        if tail_ids is not None and self.reach:
            last = tail_ids[-min(self.reach, known) :]
            positions = torch.arange(resume - last.shape[0], resume, device=self.device)
            self.tail[slot, positions % self.tail.shape[1]] = last.to(self.device)
        return slot

    def take_over(self, progress: Progress, held: Sequence[int | None] | None = None) -> int:
        """A slot with room for a sequence that has come as far as `progress`; the caller fills it in.

        Args:
            progress: of the sequence.
            held: packed only: pages that hold its compressed keys already, in order; None for a fresh one.

        Raises:
            CacheFull: no slot is free, the sequence does not fit, or pages run out; nothing has changed.
        """
        if progress.length > self.max_tokens:
            raise CacheFull(
                f"a sequence of {progress.length} tokens does not fit: slots have room for {self.max_tokens}"
            )
        if self.pages is not None:
            held = [None] * -(-progress.length // self.pages.page_tokens) if held is None else held
            if (missing := self.pages.taken(held)) > self.pages.free_pages:
                raise _out_of_pages(missing, self.pages)
        slot = self.allocate()
        if self.pages is not None and held is not None:
            self.pages.lay(slot, held)
        self._progress[slot] = replace(progress)
        return slot

    def export_slot(self, slot: int) -> dict[str, Tensor]:
        """All that `slot` holds, to go on elsewhere with the same bits."""
        return export_slot(self, slot)

    def check_slot(self, state: Mapping[str, Tensor]) -> int:
        """Tokens of a state that `import_slot` would take. Raises ValueError when it would not."""
        return check_slot(self, state).length

    def import_slot(self, state: Mapping[str, Tensor]) -> int:
        """A slot with what `export_slot` gave. Raises CacheFull, or ValueError for what does not fit."""
        return import_slot(self, state)

    def fork(self, slot: int) -> int:
        """A new slot with the sequence in `slot`; pages are shared until one of the two writes into them."""
        progress = self.progress(slot)
        copy = self.allocate()
        self.windows.copy(slot, copy)
        for group_cache in self._dense_groups():
            group_cache.copy(slot, copy)
        if self.pages is not None:
            self.pages.share(slot, copy, progress.length)
        for pending in self.pending.values():
            pending[copy] = pending[slot]
        self.tail[copy] = self.tail[slot]
        if self.draft is not None:
            self.draft.copy(slot, copy)
        self._progress[copy] = replace(progress)
        return copy

    def free(self, slot: int) -> None:
        """Give `slot` back."""
        self.progress(slot)
        self._progress[slot] = None
        if self.pages is not None:
            self.pages.release(slot)
        self._free.append(slot)

    def progress(self, slot: int) -> Progress:
        """How far `slot` has come. Raises ValueError when it is not allocated."""
        progress = self._progress[slot] if 0 <= slot < self.max_sequences else None
        if progress is None:
            raise ValueError(f"slot {slot} is not allocated: call allocate() or fork() first")
        return progress

    def length(self, slot: int) -> int:
        """Tokens held in `slot`. Raises ValueError when it is not allocated."""
        return self.progress(slot).length

    def decoded(self, slot: int) -> int:
        """Where the decoder stopped in `slot`, exclusive; tokens before it may have been skipped."""
        return self.progress(slot).decoded

    def floors(self, slot: int) -> tuple[int, int]:
        """First positions whose window keys the encoder and the decoder see in `slot`."""
        progress = self.progress(slot)
        return progress.floor, progress.decoder_floor

    def truncate(self, slot: int, length: int) -> None:
        """Take back the tokens of `slot` from `length` on, at most `slack` of those ever written.

        Raises:
            ValueError: `length` is beyond the sequence or reaches further back than its rings; nothing has
                changed.
        """
        progress = self.progress(slot)
        least = progress.least(self.slack)
        if not least <= length <= progress.length:
            raise ValueError(
                f"slot {slot} can be cut to {least} .. {progress.length} tokens, not to {length}: its rings "
                f"hold {self.slack} tokens beyond the window; fork before what may have to be undone"
            )
        progress.truncate(length)
        if self.draft is not None:
            self.draft.truncate(slot, length)
        if self.pages is not None:
            self.pages.shrink(slot, length)

    def target(self, slots: Tensor) -> CacheTarget:
        """`slots` as rows need them."""
        return CacheTarget(slots, self.max_tokens, self.slack)

    @property
    def free_slots(self) -> int:
        """How many sequences can still be allocated."""
        return len(self._free)

    def make_room(
        self, slots: list[int], lengths: list[int], decode_from: list[int] | None = None
    ) -> list[Span]:
        """Prepare for `lengths` new tokens, of which the decoder runs those from `decode_from` on.

        Returns:
            What each slot's call has to run; `advance` counts it.

        Raises:
            ValueError: a slot is not allocated or appears twice; nothing has changed.
            CacheFull: a sequence would be too long, or pages run out; nothing has changed.
        """
        if len(set(slots)) != len(slots):
            raise ValueError("a slot appears twice in one call: extend each sequence once a call")
        begins = [None] * len(slots) if decode_from is None else decode_from
        spans = [
            self.progress(slot).plan(new, begin)
            for slot, new, begin in zip(slots, lengths, begins, strict=True)
        ]
        for slot, span in zip(slots, spans, strict=True):
            if span.end > self.max_tokens:
                raise CacheFull(
                    f"slot {slot} holds {span.start} tokens and has room for {self.max_tokens}: "
                    f"{span.length} more do not fit; shorten the sequence or make the cache larger"
                )
        if self.pages is not None:
            self._reserve(self.pages, slots, [span.length - span.counted for span in spans])
        return spans

    def advance(self, slots: list[int], spans: list[Span]) -> None:
        """Count what a call has run."""
        for slot, span in zip(slots, spans, strict=True):
            self.progress(slot).advance(span)

    def _reserve(self, pages: PageTable, slots: list[int], new: list[int]) -> None:
        held = [self.length(slot) for slot in slots]
        if (missing := pages.missing(slots, held, new)) > pages.free_pages:
            raise _out_of_pages(missing, pages)
        if copies := pages.reserve(slots, held, new):
            source, target = torch.tensor(copies, device=self.device).unbind(1)
            for group_cache in (*self.main.values(), *self.index_keys.values()):
                assert isinstance(group_cache, PackedGroupCache)
                group_cache.copy_pages(source, target)

    def _dense_groups(self) -> list[GroupCache]:
        return [
            cache
            for cache in (*self.main.values(), *self.index_keys.values())
            if isinstance(cache, GroupCache)
        ]

    def _lay_out_dense(self, config: PolicyConfig, dtype: torch.dtype) -> None:
        for layer, ratio in self.ratios.items():
            groups = -(-self.max_tokens // ratio)
            self.main[layer] = GroupCache(self.max_sequences, groups, config.head_dim, dtype, self.device)
            self.index_keys[layer] = GroupCache(
                self.max_sequences, groups, config.index_head_dim, dtype, self.device
            )

    def _lay_out_pages(self, config: PolicyConfig, dtype: torch.dtype, pages: int | None) -> None:
        packed = RecordRows if rows_of_records(self.device) else PackedGroupCache
        page_tokens = tokens_of_page(config)
        per_slot = -(-self.max_tokens // page_tokens)
        count = self.max_sequences * per_slot if pages is None else pages
        self.pages = PageTable(self.max_sequences, per_slot, count, page_tokens, self.device)
        for layer, ratio in self.ratios.items():
            groups = (page_tokens // ratio, -(-self.max_tokens // ratio))
            for kind, width, record in (
                (self.main, config.head_dim, MAIN),
                (self.index_keys, config.index_head_dim, INDEX),
            ):
                kind[layer] = packed(self.pages, count + 1, groups, width, record, dtype)

    def _open_groups(self, config: PolicyConfig) -> dict[int, Tensor]:
        """Values and gates of tokens whose group may be open, float32, entry = position mod entries."""
        return {
            layer: torch.zeros(
                self.max_sequences,
                ring_size(ratio - 1, self.slack, ratio),
                2 * config.head_dim,
                device=self.device,
            )
            for layer, ratio in self.ratios.items()
            if ratio > 1
        }


def _out_of_pages(missing: int, pages: PageTable) -> CacheFull:
    return CacheFull(
        f"{missing} pages are needed and {pages.free_pages} are free: "
        "free a sequence, or give the cache more pages"
    )
