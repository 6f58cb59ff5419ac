"""What the prefix store is worth to agents: hits over days, bytes by tier, and loading against computing.

    python -m benchmarks.prefix [--sessions N] [--seed N]

A trace of growing sessions (50 to 200 turns, 30 tokens read for one written, pauses from seconds to 72 hours,
every turn on either of two engines of one machine) runs on a virtual clock through real caches and a real
store; only the network is left out. Then the nano policy computes a history, and goes on from each tier, in
the same run. The last line holds the figures; exit status 1 when one misses what it is to show:

    reuse      at least 0.95 of the tokens that were seen before are found
    speedup    computing 4,096 tokens takes at least 3 times as long as going on from them, keys from disk and
               windows lost
    sessions   a GB of disk holds at least 10 of the trace's sessions at the released policy's widths
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.kv_bytes import CacheBytes, measure
from benchmarks.prefix_times import LENGTH, Times, measure_engine, measure_times
from model.cache.page_keys import Fingerprint
from model.cache.policy_cache import PolicyCache
from model.cache.prefix import PrefixStats, PrefixStore, PrefixTiers
from model.config import PolicyConfig

_NANO = PolicyConfig.preset("nano")
_ENGINES, _SLOTS, _LONGEST, _PAGES = 2, 4, 40_000, 640
_READ, _WRITTEN, _SYSTEM = 180, 6, 512
_TURNS = (50, 200)
_PAUSES = ((0.75, 2.0, 60.0), (0.2, 60.0, 3600.0), (0.05, 3600.0, 72 * 3600.0))
"""(share, shortest, longest) in seconds: a tool, a person at work, a person who comes back."""
_TARGETS = {"reuse": 0.95, "speedup": 3.0, "sessions": 10.0}


@dataclass(slots=True)
class Session:
    """One agent's history as it grows."""

    draw: random.Random
    turns: int
    history: list[int]
    known: int = 0
    """Tokens that were computed before."""

    def pause(self) -> float:
        """Seconds to its next turn."""
        (kind,) = self.draw.choices(_PAUSES, [share for share, _, _ in _PAUSES])
        return kind[1] * (kind[2] / kind[1]) ** self.draw.random()

    def read(self) -> None:
        """Take in a tool's answer."""
        self.history += self.draw.choices(range(64), k=self.draw.randint(_READ // 2, 3 * _READ // 2))

    def write(self) -> list[int]:
        """What the policy answers."""
        return self.draw.choices(range(64), k=_WRITTEN)


@dataclass(slots=True)
class Trace:
    """Sessions on engines that share a store, under a virtual clock."""

    seed: int
    folder: Path
    disk: Path
    now: float = 1e9
    counts: Counter[str] = field(default_factory=Counter)
    caches: list[PolicyCache] = field(default_factory=list)
    stores: list[PrefixStore] = field(default_factory=list)

    def open(self, host_bytes: int, window_bytes: int) -> None:
        """Make the engines' caches, each with room for a few sessions, and open their stores."""
        tiers = PrefixTiers(
            host_folder=self.folder,
            host_bytes=host_bytes,
            disk_folder=self.disk,
            disk_bytes=1 << 30,
            window_share=0.1,
            memory_bytes=10 * window_bytes,
        )
        fingerprint = Fingerprint.of(_NANO, model="trace", version=0, tokenizer="trace", numerics={})
        for _ in range(_ENGINES):
            self.caches.append(
                PolicyCache(_NANO, _SLOTS, _LONGEST, torch.float32, torch.device("cpu"), "packed", _PAGES)
            )
            self.stores.append(
                PrefixStore(
                    fingerprint,
                    tiers,
                    config=_NANO,
                    replay="bounded",
                    clock=lambda: self.now,
                )
            )

    def turn(self, session: Session, engine: int) -> None:
        """Find what is known, lay the rest out as if it had been computed, and keep everything."""
        cache, store = self.caches[engine], self.stores[engine]
        session.read()
        loaded = store.load(cache, store.lookup(session.history, cache=cache), _no_look_back)
        found = 0 if loaded is None else loaded.global_tokens
        slot = cache.allocate() if loaded is None else loaded.slot
        self.counts["asked"] += len(session.history)
        self.counts["known"] += session.known
        self.counts["found"] += found
        self.counts["replayed"] += 0 if loaded is None else loaded.replay
        self.counts["turns"] += 1
        self.counts["with windows"] += loaded is not None and not loaded.replay
        self.counts["without windows"] += loaded is not None and loaded.replay > 0
        new = len(session.history) - found + (0 if loaded is None else loaded.replay)
        session.history += session.write()
        cache.advance([slot], cache.make_room([slot], [new + _WRITTEN]))
        store.save(cache, slot, session.history)
        cache.free(slot)
        session.known = len(session.history)

    def run(self, count: int) -> list[int]:
        """Play `count` sessions to their end; returns their lengths."""
        draw = random.Random(self.seed)
        system = draw.choices(range(64), k=_SYSTEM)
        sessions = [
            Session(random.Random(draw.random()), draw.randint(*_TURNS), list(system)) for _ in range(count)
        ]
        due = [(self.now + session.pause(), i) for i, session in enumerate(sessions)]
        while due:
            self.now, i = min(due)
            due.remove((self.now, i))
            self.turn(sessions[i], draw.randrange(_ENGINES))
            sessions[i].turns -= 1
            if sessions[i].turns:
                due.append((self.now + sessions[i].pause(), i))
        return [len(session.history) for session in sessions]


def _no_look_back(_: int) -> torch.Tensor:
    """The trace computes nothing, so it looks back to nothing."""
    return torch.zeros(_NANO.engram_max_ngram_size - 1, dtype=torch.int64)


def print_trace(trace: Trace, lengths: list[int], stats: list[PrefixStats]) -> float:
    """Hits, tiers and bytes; returns the share of known tokens that was found."""
    counts, reuse = trace.counts, trace.counts["found"] / trace.counts["known"]
    print(
        f"{len(lengths)} sessions, {counts['turns']} turns, {min(lengths)} .. {max(lengths)} tokens at the "
        f"end, {(trace.now - 1e9) / 3600:.0f} hours; input:output {_READ // _WRITTEN}:1"
    )
    print(
        f"turns with windows {counts['with windows'] / counts['turns']:.3f}, with keys alone "
        f"{counts['without windows'] / counts['turns']:.3f}; tokens found {counts['found']} of "
        f"{counts['known']} known and {counts['asked']} asked: hit rate "
        f"{counts['found'] / counts['asked']:.4f}; replayed {counts['replayed']}"
    )
    pages = {
        tier: sum(getattr(one.usage, f"{tier}_pages") for one in stats)
        for tier in ("accelerator", "host", "disk")
    }
    total = sum(pages.values())
    print("pages from " + ", ".join(f"{tier} {pages[tier] / total:.3f}" for tier in pages))
    for name in ("host", "disk", "windows"):
        tiers = [getattr(one, name) for one in stats]
        dropped = {
            reason: sum(getattr(tier.counters, reason) for tier in tiers)
            for reason in ("evicted", "expired", "corrupt")
        }
        print(f"{name:8} {tiers[0].nbytes:>10} B of {tiers[0].max_bytes:>10}, dropped {dropped}")
    return reuse


def sessions_per_gb(sizes: CacheBytes, lengths: list[int]) -> tuple[float, float]:
    """Sessions of these lengths that a GB of disk, and of window pool, holds."""
    mean = sum(map(sizes.pages, lengths)) / len(lengths)
    return 1e9 / mean, 1e9 / (sum(map(sizes.tail, lengths)) / len(lengths))


def print_times(times: Times) -> float:
    """Seconds to be ready for the next token, by what is left of a history; returns the worst speed-up."""
    print(f"{LENGTH} tokens of the nano policy and 16 new ones: computed in {times.computed * 1e3:.0f} ms")
    for name, seconds in times.loaded.items():
        print(f"  {name:28} {seconds * 1e3:7.1f} ms, {times.computed / seconds:6.1f} times as fast")
    return times.computed / max(times.loaded.values())


def main() -> int:
    """Play the trace, time the policy, and print the figures last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory = Path(tempfile.mkdtemp(prefix="prefix-benchmark-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="prefix-benchmark-"))
    try:
        trace = Trace(options.seed, memory / "trace", disk / "trace")
        trace.open(host_bytes=4 << 20, window_bytes=1 << 18)
        lengths = trace.run(options.sessions)
        reuse = print_trace(trace, lengths, [store.stats() for store in trace.stores])
        speedup = print_times(measure_times(memory / "times", disk / "times"))
        cold, hit = measure_engine(memory / "engine")
    finally:
        shutil.rmtree(memory)
        shutil.rmtree(disk)
    print(
        f"engine, first token of a session of 2048 tokens from another engine: cold {cold * 1e3:.0f} ms, "
        f"hit {hit * 1e3:.0f} ms, {cold / hit:.1f} times as fast"
    )
    on_disk, in_pool = sessions_per_gb(measure(PolicyConfig.preset("official")), lengths)
    print(f"released policy, sessions of these lengths in a GB: {on_disk:.1f} of keys, {in_pool:.0f} tails")
    figures = {"reuse": reuse, "speedup": speedup, "sessions": on_disk}
    missed = [name for name, target in _TARGETS.items() if figures[name] < target]
    for name in missed:
        print(f"{name} {figures[name]:.3f} misses its {_TARGETS[name]}")
    print("prefix " + " ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
