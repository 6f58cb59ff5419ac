"""The prefix store: what histories have in common is computed once, and kept while it is worth its place.

Compressed keys are small, cost the whole encoder to compute and are good for days: they are kept by the page,
by content, on the accelerator while their pages are not needed otherwise, in host memory, and on disk.
Windows are large for what they save, a replay of a few tokens, and good for minutes: the tail of a whole
session is kept in host memory alone. A history that comes back with its tail goes on where it stopped; one
whose tail is gone lays its compressed keys in place and runs its last tokens again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from model.cache.page_file import Entry, Kind
from model.cache.page_keys import Fingerprint, ImageMark, KeyChain
from model.cache.policy_cache import PolicyCache, tokens_of_page
from model.cache.state_bytes import (
    fits,
    pack_tail,
    page_bytes,
    page_rows,
    progress_of,
    read_pages,
    restore_tail,
    tail_state,
    unpack_tail,
    write_pages,
)
from model.cache.tiers import Address, Clock, FileTier, TierCounters, memory_backed
from model.config import PolicyConfig
from model.replay import Replay, resume_from

_PARTIAL = "partial"
_NOTED_S = 60.0

LookBack = Callable[[int], Tensor]
TokenIds = Sequence[int] | np.ndarray


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTiers:
    """Where entries are kept besides the accelerator, how many and how long; processes may share folders."""

    host_folder: Path
    """In memory (tmpfs, for example /dev/shm/...), shared by the engines of a machine."""
    host_bytes: int
    """Compressed keys in host memory."""
    disk_folder: Path | None = None
    """On a disk, or a file system that other machines see too; None: keys last as long as memory does."""
    disk_bytes: int = 0
    """Compressed keys on disk."""
    page_ttl_s: float = 72 * 3600.0
    """Seconds from its last use to a page's end."""
    window_share: float = 0.1
    """Most of the machine's memory that tails of sessions may take."""
    window_ttl_s: float = 600.0
    """Seconds from its last use to a tail's end."""
    memory_bytes: int = field(default_factory=_physical_memory)
    """The machine's memory."""

    def __post_init__(self) -> None:
        """Refuse a host folder that is on disk: windows are never written to one."""
        if not memory_backed(self.host_folder):
            raise ValueError(
                f"host_folder {self.host_folder} is not in memory: choose a folder on a tmpfs, such as one "
                "in /dev/shm (in a container, give it room with --shm-size)"
            )
        if not 0 < self.window_share < 1:
            raise ValueError(f"window_share is a share of memory between 0 and 1, got {self.window_share}")

    @property
    def window_bytes(self) -> int:
        """Bytes of tails."""
        return int(self.window_share * self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Hit:
    """What the store has of a history."""

    global_tokens: int
    """Leading tokens whose compressed keys are there; 0: a miss."""
    window: bool
    """Whether their windows are there too."""
    pages: tuple[bytes, ...] = ()
    """Names of the whole pages."""
    tail: Address | None = None
    """The state after `global_tokens`, when their windows are there."""
    end: int = 0
    """Length for which the decoder's start was planned."""

    def __bool__(self) -> bool:
        return self.global_tokens > 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A history's beginning, laid into a cache."""

    slot: int
    global_tokens: int
    replay: int
    """How many of the last of these tokens have to be run again for their windows; 0 when those came too."""
    replay_starts: tuple[int, ...]
    """Encoder replays in force when these keys were computed, besides position 0."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Whole pages of a history, up to the first that is gone."""

    held: list[int | None]
    """Pages in the cache, None where the content comes from elsewhere."""
    contents: list[bytes]
    """Those contents."""
    starts: list[int]
    """Encoder replays in force."""


@dataclass(slots=True)
class Usage:
    """What became of this process's lookups and loads."""

    lookups: int = 0
    window_hits: int = 0
    global_hits: int = 0
    misses: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    lost: int = 0
    """Loads that found less than their lookup, because something was dropped in between."""
    accelerator_pages: int = 0
    """Pages found still on the accelerator."""
    host_pages: int = 0
    """Pages read from host memory."""
    disk_pages: int = 0
    """Pages read from disk."""


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """A tier as it is now; the counters are those of this process."""

    nbytes: int
    max_bytes: int
    counters: TierCounters


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """A snapshot of the store."""

    usage: Usage
    host: TierSnapshot
    disk: TierSnapshot | None
    windows: TierSnapshot


class PrefixStore:
    """Beginnings of histories for the policy `fingerprint` stands for; made once an engine."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        tiers: PrefixTiers,
        *,
        config: PolicyConfig,
        replay: Replay,
        clock: Clock = time.time,
    ) -> None:
        """Open the tiers.

        Args:
            fingerprint: of the policy. Engines that differ in anything that changes keys need different ones.
            tiers: where to keep entries.
            config: of the policy.
            replay: how lost windows are filled; "off": keys without windows are no hit.
            clock: tells the time.
        """
        self.fingerprint, self.page_tokens = fingerprint, tokens_of_page(config)
        self.config = config
        self.replay: Replay = replay
        self.usage = Usage()
        self._clock = clock
        self._seed = fingerprint.digest()
        self._limits = tiers

        def tier(folder: Path, max_bytes: int, ttl_s: float, durable: bool) -> FileTier:
            return FileTier(
                folder,
                max_bytes=max_bytes,
                ttl_s=ttl_s,
                durable=durable,
                family=fingerprint.family,
                version=fingerprint.version,
                clock=clock,
            )

        host = tiers.host_folder
        self._host = tier(host / "pages", tiers.host_bytes, tiers.page_ttl_s, False)
        self._windows = tier(host / "windows", tiers.window_bytes, tiers.window_ttl_s, False)
        self._disk = None
        if tiers.disk_folder is not None:
            self._disk = tier(tiers.disk_folder, tiers.disk_bytes, tiers.page_ttl_s, True)
        self._page_tiers = [self._host] if self._disk is None else [self._host, self._disk]

    def set_version(self, version: int) -> None:
        """Go over to updated weights: what the old ones computed is out of reach from now on, and dropped."""
        if version == self.fingerprint.version:
            return
        self.fingerprint = self.fingerprint.at(version)
        self._seed = self.fingerprint.digest()
        for tier in (*self._page_tiers, self._windows):
            tier.move_to(version)

    def lookup(
        self,
        token_ids: TokenIds,
        images: Sequence[ImageMark] = (),
        *,
        cache: PolicyCache | None = None,
        end: int | None = None,
    ) -> Hit:
        """The longest beginning of a history that need not be computed; its last token always is.

        Args:
            token_ids: the history.
            images: the images in it.
            cache: also look for pages still there.
            end: length for which the decoder's start was planned; None: that of the history.
        """
        chain = self._chain(token_ids, images, max(len(token_ids) - 1, 0))
        held = next((i for i, key in enumerate(chain.pages) if not self._holds(key, cache)), len(chain.pages))
        hit = self._best(chain, held, len(token_ids) if end is None else end)
        self._count(hit, len(token_ids))
        return hit

    def load(self, cache: PolicyCache, hit: Hit, look_back: LookBack) -> Loaded | None:
        """Lay what was found into a new slot; None when too little of it is left.

        Args:
            cache: gets the sequence.
            hit: what was found.
            look_back: gives the ids before a position as n-grams see them (`Policy.look_back_ids`).

        Raises:
            CacheFull: no slot or too few pages are free; nothing has changed.
        """
        _check_packed(cache)
        found = self._fetch(cache, hit.pages)
        state = None
        if hit.tail is not None and len(found.held) == len(hit.pages):
            state = self._fetch_tail(cache, hit.tail)
        length = hit.global_tokens if state is not None else len(found.held) * self.page_tokens
        if length < hit.global_tokens or hit.window != (state is not None):
            self.usage.lost += 1
        if state is not None:
            slot, replay = self._restore(cache, found, state), 0
        elif (resume := self._resume(length, hit.end)) > 0:
            slot, replay = cache.adopt(length, resume, look_back(resume), found.held), length - resume
        else:
            return None
        assert cache.pages is not None
        pages = cache.pages.owned(slot)
        fresh = [page for page, known in zip(pages, found.held, strict=True) if known is None]
        write_pages(cache, fresh, found.contents)
        for page, key, start in zip(pages, hit.pages, found.starts, strict=False):
            if cache.pages.find(key) is None:
                cache.pages.label(page, key, start, self._clock())
        return Loaded(slot, length, replay, tuple(sorted({start for start in found.starts if start})))

    def save(
        self,
        cache: PolicyCache,
        slot: int,
        token_ids: TokenIds,
        images: Sequence[ImageMark] = (),
        *,
        replay_starts: Sequence[int] = (),
    ) -> None:
        """Keep the sequence in `slot`, all of it computed by the weights of the store's version.

        Args:
            cache: holds the sequence.
            slot: where.
            token_ids: its tokens, as many as the cache holds.
            images: the images in it.
            replay_starts: earlier positions at which its encoder windows began; the cache knows the last.

        Raises:
            ValueError: the tokens are not those in the slot, or the cache is not packed.
        """
        _check_packed(cache)
        length = cache.length(slot)
        if len(token_ids) != length:
            raise ValueError(
                f"slot {slot} holds {length} tokens, {len(token_ids)} were given: save what was computed"
            )
        chain = self._chain(token_ids, images, length)
        # An exact replay restores windows as they were.
        last = 0 if self.replay == "exact" else cache.floors(slot)[0]
        self._save_pages(cache, slot, chain, sorted({0, *replay_starts, last}))
        if length and cache.progress(slot).encoded == length:
            self._save_tail(cache, slot, chain, length)

    def sweep(self) -> None:
        """Drop what has expired. Happens by itself from time to time while entries are saved."""
        for tier in (*self._page_tiers, self._windows):
            tier.sweep()

    def stats(self) -> PrefixStats:
        """What is held, and what has happened in this process."""

        def snapshot(tier: FileTier) -> TierSnapshot:
            return TierSnapshot(tier.nbytes, tier.max_bytes, TierCounters(**asdict(tier.counters)))

        disk = None if self._disk is None else snapshot(self._disk)
        return PrefixStats(Usage(**asdict(self.usage)), snapshot(self._host), disk, snapshot(self._windows))

    # Finding

    def _chain(self, token_ids: TokenIds, images: Sequence[ImageMark], length: int) -> KeyChain:
        begun = [mark for mark in images if mark.position < length]
        return KeyChain(self._seed, token_ids[:length], begun, self.page_tokens)

    def _holds(self, key: bytes, cache: PolicyCache | None) -> bool:
        if cache is not None and cache.pages is not None and cache.pages.find(key) is not None:
            return True
        return any(tier.has(_page(key)) for tier in self._page_tiers)

    def _resume(self, length: int, end: int) -> int:
        """Where a history of `end` tokens goes on that has the compressed keys of `length`; 0: anew."""
        return resume_from(self.config, self.replay, length, end) if length else 0

    def _best(self, chain: KeyChain, held: int, end: int) -> Hit:
        """The better of two ways to use `held` whole pages: with a tail, or with a replay."""
        length = held * self.page_tokens
        resume = self._resume(length, end)
        floor = max(resume, 1)
        for place in range(held, floor // self.page_tokens - 1, -1):
            group = chain.parent(place * self.page_tokens).hex()
            for at, key in sorted(self._windows.lengths(group).items(), reverse=True):
                address = Address(Kind.TAIL, key, group, at)
                if floor <= at <= chain.tokens and chain.tail(at) == key and self._windows.has(address):
                    return Hit(at, True, tuple(chain.pages[:place]), address, end)
        return Hit(length, False, tuple(chain.pages[:held]), None, end) if resume else Hit(0, False)

    def _count(self, hit: Hit, asked: int) -> None:
        self.usage.lookups += 1
        self.usage.window_hits += hit.window
        self.usage.global_hits += bool(hit) and not hit.window
        self.usage.misses += not hit
        self.usage.asked_tokens += asked
        self.usage.hit_tokens += hit.global_tokens

    # Moving

    def _fetch(self, cache: PolicyCache, keys: Sequence[bytes]) -> _Found:
        """Pages of `keys` up to the first that is gone."""
        assert cache.pages is not None
        found = _Found([], [], [])
        promoted: list[tuple[Address, Entry]] = []
        for rank, key in enumerate(keys):
            if (page := cache.pages.find(key)) is not None:
                self.usage.accelerator_pages += 1
                found.held.append(page)
                found.starts.append(cache.pages.replay_start(page))
                continue
            if (entry := self._host.get(_page(key), rank)) is not None:
                self.usage.host_pages += 1
            elif self._disk is not None and (entry := self._disk.get(_page(key), rank)) is not None:
                self.usage.disk_pages += 1
                promoted.append((_page(key), entry))
            else:
                break
            assert len(entry.payload) == page_bytes(cache), "a fingerprint stands for one page size"
            found.held.append(None)
            found.contents.append(entry.payload)
            found.starts.append(entry.replay_start)
        self._host.put(promoted)
        return found

    def _fetch_tail(self, cache: PolicyCache, address: Address) -> dict[str, Tensor] | None:
        if (entry := self._windows.get(address)) is None:
            return None
        state = unpack_tail(entry.payload)
        return state if fits(cache, state) else None

    def _restore(self, cache: PolicyCache, found: _Found, state: dict[str, Tensor]) -> int:
        """A slot that stands where the session of `state` stood; its last page joins those of `found`."""
        if (partial := state.pop(_PARTIAL, None)) is not None:
            found.held.append(None)
            found.contents.append(partial.numpy().tobytes())
        slot = cache.take_over(progress_of(state), found.held)
        restore_tail(cache, slot, state)
        return slot

    def _save_pages(
        self, cache: PolicyCache, slot: int, chain: KeyChain, replay_starts: Sequence[int]
    ) -> None:
        """Write whole pages that a tier lacks, note the use of the others; neither if it was just done."""
        assert cache.pages is not None
        table, now = cache.pages, self._clock()
        due = [i for i, key in enumerate(chain.pages) if now - table.noted(key) > _NOTED_S]
        pages, addresses = table.owned(slot), {i: _page(chain.pages[i]) for i in due}
        missing = [[i for i in due if not tier.has(addresses[i])] for tier in self._page_tiers]
        needed = sorted({i for places in missing for i in places})
        contents = dict(zip(needed, read_pages(cache, [pages[i] for i in needed]), strict=True))
        starts = {i: max(start for start in replay_starts if start < (i + 1) * self.page_tokens) for i in due}
        for tier, places in zip(self._page_tiers, missing, strict=True):
            for i in sorted({*due} - {*places}):
                tier.touch(addresses[i], i)
            if places:
                tier.put([(addresses[i], Entry(contents[i], starts[i])) for i in places], places[0])
        for i in due:
            table.label(pages[i], chain.pages[i], starts[i], now)

    def _save_tail(self, cache: PolicyCache, slot: int, chain: KeyChain, length: int) -> None:
        assert cache.pages is not None
        state = tail_state(cache, slot)
        if length % self.page_tokens:
            last = cache.pages.owned(slot)[length // self.page_tokens]
            state[_PARTIAL] = page_rows(cache, [last])[0]
        address = Address(Kind.TAIL, chain.tail(length), chain.parent(length).hex(), length)
        self._windows.put([(address, Entry(pack_tail(state), 0))])


def _page(key: bytes) -> Address:
    return Address(Kind.PAGE, key, key.hex()[:2])


def _check_packed(cache: PolicyCache) -> None:
    if cache.pages is None:
        raise ValueError(
            "the prefix store keeps packed pages and this cache is dense: make it with storage='packed'"
        )
