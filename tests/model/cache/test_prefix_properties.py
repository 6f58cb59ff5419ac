"""Random use of allocator and prefix store: no page leaks, and nothing is loaded that was not computed."""

import random
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from model.cache.page_keys import Fingerprint
from model.cache.policy_cache import CacheFull, PolicyCache
from model.cache.prefix import PrefixStore, PrefixTiers
from model.config import PolicyConfig
from tests.model.cache.written import append, check

NANO = PolicyConfig.preset("nano")
SLOTS, PAGES, PAGE, REPLAY, LONGEST = 5, 14, 64, 16, 330


class World:
    """Two engines' caches and stores on the same folders, and what each sequence should hold."""

    def __init__(self, seed, memory_folder, disk_folder):
        self.draw, self.now, self.seen = random.Random(seed), 1e9, Counter()
        self.dropped = Counter()
        # Room for about thirty pages of 3,440 bytes in memory, eighty on disk and a dozen tails.
        self.tiers = PrefixTiers(
            host_folder=memory_folder,
            host_bytes=100_000,
            disk_folder=disk_folder,
            disk_bytes=280_000,
            memory_bytes=800_000,
        )
        self.caches, self.stores = [self.new_cache() for _ in range(2)], [None, None]
        self.tokens = [{}, {}]
        self.saved = {}
        """Histories and the versions of the weights under which they were saved."""
        for engine in range(2):
            self.open(engine, 0)

    @staticmethod
    def new_cache():
        return PolicyCache(NANO, SLOTS, LONGEST, torch.float32, torch.device("cpu"), "packed", PAGES)

    def open(self, engine, version):
        fingerprint = Fingerprint.of(NANO, model="run", version=version, tokenizer="t", numerics={})
        self.stores[engine] = PrefixStore(
            fingerprint, self.tiers, config=NANO, replay="bounded", clock=lambda: self.now
        )

    def history(self, engine):
        """A history that often begins like another."""
        known = [*list(self.saved)[-30:], *map(tuple, self.tokens[engine].values())]
        begin = list(self.draw.choice(known)) if known and self.draw.random() < 0.9 else []
        begin = begin[: self.draw.choice([len(begin), len(begin), self.draw.randrange(len(begin) + 1)])]
        new = self.draw.choice([1, 1, 5, 40, 64, 130])
        return (begin + [self.draw.randrange(3) for _ in range(new)])[: LONGEST - 1]

    def slot(self, engine):
        return self.draw.choice(list(self.tokens[engine])) if self.tokens[engine] else None

    def allocate(self, engine):
        if self.caches[engine].free_slots:
            self.tokens[engine][self.caches[engine].allocate()] = []

    def extend(self, engine):
        if (slot := self.slot(engine)) is None:
            return
        held = self.tokens[engine][slot]
        new = [self.draw.randrange(3) for _ in range(self.draw.choice([1, 1, 3, 30, 64, 100]))]
        try:
            self.tokens[engine][slot] = append(self.caches[engine], slot, held, new)
        except CacheFull:
            self.seen["full"] += 1

    def fork(self, engine):
        if (slot := self.slot(engine)) is not None and self.caches[engine].free_slots:
            copy = self.caches[engine].fork(slot)
            self.tokens[engine][copy] = list(self.tokens[engine][slot])

    def free(self, engine):
        if (slot := self.slot(engine)) is not None:
            self.caches[engine].free(slot)
            del self.tokens[engine][slot]

    def save(self, engine):
        if (slot := self.slot(engine)) is not None:
            tokens = self.tokens[engine][slot]
            self.stores[engine].save(self.caches[engine], slot, tokens)
            self.saved[tuple(tokens)] = self.saved.pop(tuple(tokens), set())
            self.saved[tuple(tokens)].add(self.stores[engine].fingerprint.version)

    def lookup(self, engine):
        """Ask for a history, check the answer against what was saved, load it and check every byte."""
        store, cache = self.stores[engine], self.caches[engine]
        asked = self.history(engine)
        hit = store.lookup(asked, cache=cache)
        self.seen["hit" if hit else "miss"] += 1
        if not hit:
            return
        begin = tuple(asked[: hit.global_tokens])
        assert len(begin) == hit.global_tokens < len(asked)
        version = store.fingerprint.version
        if hit.window:
            assert version in self.saved[begin]
        else:
            assert any(known[: len(begin)] == begin and version in at for known, at in self.saved.items())
        if self.draw.random() < 0.1:
            self.corrupt(engine)
        free = cache.free_slots, cache.pages.free_pages
        try:
            loaded = store.load(cache, hit, lambda _: torch.zeros(3, dtype=torch.int64))
        except CacheFull:
            self.seen["full"] += 1
            loaded = None
        if loaded is None:
            assert (cache.free_slots, cache.pages.free_pages) == free
            return
        assert loaded.global_tokens > REPLAY or not loaded.replay
        assert loaded.replay == (0 if hit.window and loaded.global_tokens == len(begin) else REPLAY) or (
            hit.window and loaded.global_tokens == len(begin) // PAGE * PAGE
        )
        held = asked[: loaded.global_tokens]
        check(cache, loaded.slot, held, tail=not loaded.replay)
        self.seen["loaded with a tail" if not loaded.replay else "loaded"] += 1
        if loaded.replay:
            # Without a replay by a policy the slot holds keys alone.
            cache.free(loaded.slot)
        else:
            self.tokens[engine][loaded.slot] = held

    def evict(self, engine):
        """Hand out the pages that nobody lies on."""
        cache = self.caches[engine]
        if cache.free_slots:
            slot = cache.allocate()
            room = min(cache.pages.free_pages * PAGE, LONGEST)
            if room:
                append(cache, slot, [], [3] * room)
            cache.free(slot)

    def expire(self, _):
        self.now += self.draw.choice([1, 60, 60, 60, 700, 40 * 3600.0])

    def corrupt(self, _):
        files = [*self.tiers.host_folder.glob("*/v1/*/*/*/*"), *self.tiers.disk_folder.glob("v1/*/*/*/*")]
        if not files:
            return
        path = self.draw.choice(files)
        data = bytearray(path.read_bytes())
        kind = self.draw.choice(["flip", "cut", "swap", "remove"])
        if kind == "flip":
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        elif kind == "cut":
            del data[self.draw.randrange(len(data)) :]
        elif kind == "swap":
            data = bytearray(self.draw.choice(files).read_bytes())
        path.write_bytes(data) if kind != "remove" else path.unlink()

    def restart(self, engine):
        """An engine goes and comes back on the same folders."""
        version = self.stores[engine].fingerprint.version
        self.count(engine)
        self.caches[engine], self.tokens[engine] = self.new_cache(), {}
        self.open(engine, version)

    def count(self, engine):
        stats = self.stores[engine].stats()
        for tier in (stats.host, stats.disk, stats.windows):
            self.dropped.update(asdict(tier.counters))

    def update(self, engine):
        """New weights, or those the other engine has already: sequences are computed anew."""
        for slot in list(self.tokens[engine]):
            self.caches[engine].free(slot)
        self.tokens[engine] = {}
        ours, others = (self.stores[i].fingerprint.version for i in (engine, 1 - engine))
        self.stores[engine].set_version(others if others > ours else ours + 1)
        if others <= ours and self.draw.random() < 0.7:
            self.update(1 - engine)

    def check(self):
        for cache, sequences in zip(self.caches, self.tokens, strict=True):
            lying = [page for slot in sequences for page in cache.pages.owned(slot)]
            assert cache.pages.free_pages == PAGES - len(set(lying)), "a page has leaked"
            assert all(cache.pages.references(page) == lying.count(page) for page in range(1, PAGES + 1))
            assert cache.free_slots == SLOTS - len(sequences)
        stats = self.stores[0].stats()
        for tier in (stats.host, stats.disk, stats.windows):
            assert tier.nbytes <= tier.max_bytes

    def check_all(self):
        for cache, sequences in zip(self.caches, self.tokens, strict=True):
            for slot, tokens in sequences.items():
                check(cache, slot, tokens, tail=bool(tokens))
        for store in self.stores:
            store.sweep()
        stats = self.stores[0].stats()
        on_disk = sum(path.stat().st_size for path in self.tiers.disk_folder.glob("v1/*/*/*/*"))
        assert stats.disk.nbytes == on_disk


KINDS = {
    "allocate": 4,
    "extend": 12,
    "fork": 3,
    "free": 5,
    "save": 10,
    "lookup": 14,
    "evict": 1,
    "expire": 1,
    "corrupt": 1,
    "restart": 0.3,
    "update": 0.2,
}


def run(operations, seed, memory_folder, disk_folder):
    world = World(seed, memory_folder, disk_folder)
    for operation in range(operations):
        (kind,) = world.draw.choices(list(KINDS), list(KINDS.values()))
        getattr(world, kind)(world.draw.randrange(2))
        world.check()
        if operation % 97 == 0:
            world.check_all()
    world.check_all()
    for engine in range(2):
        world.count(engine)
    return world


def test_random_operations(memory_folder, tmp_path):
    world = run(1_000, 0, memory_folder, tmp_path)
    assert min(world.seen[kind] for kind in ("hit", "miss", "loaded", "loaded with a tail")) > 10


@pytest.mark.slow
def test_ten_thousand_random_operations(memory_folder, tmp_path):
    world = run(10_000, 1, memory_folder, tmp_path)
    assert min(world.seen[kind] for kind in ("hit", "miss", "loaded", "loaded with a tail", "full")) > 90
    assert min(world.dropped[kind] for kind in ("evicted", "expired", "outdated", "corrupt", "foreign")) > 5
