"""All state of the sequences an engine holds, by slot: allocate, extend through the policy, fork, free."""

from __future__ import annotations

from math import lcm
from typing import Literal, get_args

import torch
from torch import Tensor

from model.cache.draft import DraftWindow
from model.cache.main_kv import GroupCache, GroupStorage, PackedGroupCache
from model.cache.pages import PageTable
from model.cache.records import INDEX, MAIN
from model.cache.swa import PackedWindowRing, WindowRing, WindowStorage
from model.config import PolicyConfig

Storage = Literal["dense", "packed"]
"""Keys as floats, a fixed place a slot; or as 4- and 8-bit records, compressed keys on pages."""

_PAGE_TOKENS = 64


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

        Raises:
            ValueError: a size below 1, an unknown storage, or `pages` without packed storage.
        """
        if max_sequences < 1 or max_tokens < 1:
            raise ValueError(
                f"a cache needs room: got max_sequences {max_sequences}, max_tokens {max_tokens}"
            )
        if storage not in get_args(Storage):
            raise ValueError(
                f"unknown cache storage {storage!r}: choose one of {', '.join(get_args(Storage))}"
            )
        if pages is not None and (storage == "dense" or pages < 1):
            raise ValueError(
                f"pages must be at least 1 and belong to packed storage: got {pages} with {storage!r}"
            )
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.device, self.storage = device, storage
        ring = WindowRing if storage == "dense" else PackedWindowRing
        self.windows: WindowStorage = ring(
            config.num_hidden_layers, max_sequences, config.sliding_window, config.head_dim, dtype, device
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
        if config.num_nextn_predict_layers:
            self.draft = DraftWindow(config, max_sequences, dtype, device, storage)
        self.tail = torch.zeros(
            max_sequences, max(config.engram_max_ngram_size - 1, 0), dtype=torch.int64, device=device
        )
        self.blank_tail = 0
        self._lengths: list[int | None] = [None] * max_sequences
        self._free = list(range(max_sequences - 1, -1, -1))

    def allocate(self) -> int:
        """A slot with an empty sequence. Raises CacheFull when none is free."""
        if not self._free:
            raise CacheFull(f"all {self.max_sequences} slots are taken: free one, or make the cache larger")
        slot = self._free.pop()
        self._lengths[slot] = 0
        self.tail[slot] = self.blank_tail
        if self.draft is not None:
            self.draft.clear(slot)
        if self.pages is not None:
            self.pages.clear(slot)
        return slot

    def fork(self, slot: int) -> int:
        """A new slot with the sequence in `slot`; pages are shared until one of the two writes into them."""
        length = self.length(slot)
        copy = self.allocate()
        self.windows.copy(slot, copy)
        for group_cache in self._dense_groups():
            group_cache.copy(slot, copy)
        if self.pages is not None:
            self.pages.share(slot, copy, length)
        for pending in self.pending.values():
            pending[copy] = pending[slot]
        self.tail[copy] = self.tail[slot]
        if self.draft is not None:
            self.draft.copy(slot, copy)
        self._lengths[copy] = length
        return copy

    def free(self, slot: int) -> None:
        """Give `slot` back."""
        self.length(slot)
        self._lengths[slot] = None
        if self.pages is not None:
            self.pages.release(slot)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Tokens held in `slot`. Raises ValueError when it is not allocated."""
        length = self._lengths[slot] if 0 <= slot < self.max_sequences else None
        if length is None:
            raise ValueError(f"slot {slot} is not allocated: call allocate() or fork() first")
        return length

    @property
    def free_slots(self) -> int:
        """How many sequences can still be allocated."""
        return len(self._free)

    def make_room(self, slots: list[int], lengths: list[int]) -> None:
        """Prepare for `lengths` new tokens.

        Raises:
            ValueError: a slot is not allocated or appears twice; nothing has changed.
            CacheFull: a sequence would be too long, or pages run out; nothing has changed.
        """
        if len(set(slots)) != len(slots):
            raise ValueError("a slot appears twice in one call: extend each sequence once a call")
        for slot, new in zip(slots, lengths, strict=True):
            if self.length(slot) + new > self.max_tokens:
                raise CacheFull(
                    f"slot {slot} holds {self.length(slot)} tokens and has room for {self.max_tokens}: "
                    f"{new} more do not fit; shorten the sequence or make the cache larger"
                )
        if self.pages is not None:
            self._reserve(self.pages, slots, lengths)

    def advance(self, slots: list[int], lengths: list[int]) -> None:
        """Count the tokens that have been appended."""
        for slot, new in zip(slots, lengths, strict=True):
            self._lengths[slot] = self.length(slot) + new

    def _reserve(self, pages: PageTable, slots: list[int], new: list[int]) -> None:
        held = [self.length(slot) for slot in slots]
        if (missing := pages.missing(slots, held, new)) > pages.free_pages:
            raise CacheFull(
                f"{missing} pages are needed and {pages.free_pages} are free: "
                "free a sequence, or give the cache more pages"
            )
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
        for layer in config.kv_source_layer_ids:
            groups = -(-self.max_tokens // config.ratio(layer))
            self.main[layer] = GroupCache(self.max_sequences, groups, config.head_dim, dtype, self.device)
            self.index_keys[layer] = GroupCache(
                self.max_sequences, groups, config.index_head_dim, dtype, self.device
            )

    def _lay_out_pages(self, config: PolicyConfig, dtype: torch.dtype, pages: int | None) -> None:
        ratios = {layer: config.ratio(layer) for layer in config.kv_source_layer_ids}
        whole = lcm(*ratios.values())
        page_tokens = -(-_PAGE_TOKENS // whole) * whole
        per_slot = -(-self.max_tokens // page_tokens)
        count = self.max_sequences * per_slot if pages is None else pages
        self.pages = PageTable(self.max_sequences, per_slot, count, page_tokens, self.device)
        for layer, ratio in ratios.items():
            groups = (page_tokens // ratio, -(-self.max_tokens // ratio))
            for kind, width, record in (
                (self.main, config.head_dim, MAIN),
                (self.index_keys, config.index_head_dim, INDEX),
            ):
                kind[layer] = PackedGroupCache(self.pages, count + 1, groups, width, record, dtype)

    def _open_groups(self, config: PolicyConfig) -> dict[int, Tensor]:
        """Keys and gates of the tokens of each open group, float32, entry = position mod ratio."""
        ratios = {layer: config.ratio(layer) for layer in config.kv_source_layer_ids}
        return {
            layer: torch.zeros(self.max_sequences, ratio, 2 * config.head_dim, device=self.device)
            for layer, ratio in ratios.items()
            if ratio > 1
        }
