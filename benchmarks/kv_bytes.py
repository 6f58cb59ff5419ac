"""How many bytes of cache a token costs, from buffers that are really allocated.

    python -m benchmarks.kv_bytes [--config FILE]

A packed cache with a few pages is allocated at the widths of a published `config.json` (the released model
without one). Compressed keys cost a fixed number of bytes a token; the windows and the open groups a fixed
number a sequence. The tables are computed from these sizes: what a sequence keeps on the accelerator while it
is served, what the prefix store keeps of it for minutes (its tail, in host memory) and for days (whole pages
of compressed keys, in host memory and on disk), and what a returning sequence fetches from each tier and runs
again, by what the store still has. The last line is the measured figure for compressed keys.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.cache.page_file import HEADER_BYTES
from model.cache.policy_cache import PolicyCache
from model.config import PolicyConfig

LENGTHS = (4096, 16384, 65536, 131072, 1048576)
_PAGES = 4


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Sizes measured on an allocated cache."""

    main_per_token: float
    index_per_token: float
    window: int
    """A sequence's windows in all layers."""
    open_groups: int
    """A sequence's open compression groups."""
    look_back: int
    """Ids the n-gram memory looks back to."""
    page_tokens: int

    @property
    def per_token(self) -> float:
        """Compressed keys of a token, main and index keys of all layers."""
        return self.main_per_token + self.index_per_token

    def pages(self, length: int) -> float:
        """Bytes of the whole pages of `length` tokens, as they lie in host memory and on disk."""
        count = length // self.page_tokens
        return count * (self.page_tokens * self.per_token + HEADER_BYTES)

    def tail(self, length: int) -> float:
        """Bytes of what else a sequence of `length` tokens needs to go on where it stopped."""
        partial = self.page_tokens * self.per_token if length % self.page_tokens else 0
        return self.window + self.open_groups + self.look_back + partial + HEADER_BYTES

    def resident(self, length: int) -> float:
        """Bytes on the accelerator of a sequence of `length` tokens."""
        return self.per_token * length + self.window + self.open_groups + self.look_back


def measure(config: PolicyConfig) -> CacheBytes:
    """Allocate a small packed cache of `config` and read its buffers' sizes."""
    dtype, device = getattr(torch, config.dtype), torch.device("cpu")
    cache = PolicyCache(config, 1, 1, dtype, device, "packed", _PAGES, slack=0)
    assert cache.pages is not None
    # The page that is never handed out has buffers too, and as many tokens' worth.
    tokens = (_PAGES + 1) * cache.pages.page_tokens
    return CacheBytes(
        sum(storage.nbytes for storage in cache.main.values()) / tokens,
        sum(storage.nbytes for storage in cache.index_keys.values()) / tokens,
        cache.windows.nbytes,
        sum(pending.nbytes for pending in cache.pending.values()),
        cache.tail.nbytes,
        cache.pages.page_tokens,
    )


def growth(config: PolicyConfig, device: torch.device) -> float:
    """Bytes a token by which a packed cache on `device` grows: its keys, and its share of the page table.

    Buffers are counted, not the blocks of an allocator, which can exceed them by a MiB each.
    """
    dtype, (short, long) = getattr(torch, config.dtype), LENGTHS[:2]
    sizes = [allocated(PolicyCache(config, 1, tokens, dtype, device, "packed")) for tokens in (short, long)]
    return (sizes[1] - sizes[0]) / (long - short)


def allocated(cache: PolicyCache) -> int:
    """Bytes of all buffers that a cache holds, whoever of its parts holds them, each counted once."""
    buffers, seen, found = dict[int, int](), set[int](), list[object]([cache])
    while found:
        part = found.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            buffers[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, dict):
            found += part.values()
        elif isinstance(part, list | tuple):
            found += part
        else:
            found += getattr(part, "__dict__", {}).values()
    return sum(buffers.values())


def print_lengths(sizes: CacheBytes) -> None:
    """What a sequence keeps, by its length, tier and lifetime."""
    print(f"a sequence: windows {sizes.window} B, open groups {sizes.open_groups} B; ", end="")
    print(f"a page: {sizes.page_tokens} tokens")
    names = f"{'served, B':>14} {'host B':>16} {'disk B':>14} {'B/token':>8} {'windows/tok':>11}"
    print(f"{'tokens':>8} {names}")
    for length in LENGTHS:
        resident = sizes.resident(length)
        print(
            f"{length:>8} {resident:>14.0f} {sizes.tail(length):>16.0f} {sizes.pages(length):>14.0f} "
            f"{resident / length:>8.0f} {sizes.window / length:>11.0f}"
        )


def print_hits(sizes: CacheBytes, window: int) -> None:
    """What a sequence that comes back fetches from each tier, and the tokens that are run again."""
    print(f"{'tokens':>8} {'keys':<12} {'windows':<8} {'host B':>12} {'disk B':>12} {'replayed tokens':>16}")
    for length in LENGTHS:
        keys, tail, replay = sizes.pages(length), sizes.tail(length), min(window, length)
        for where, host, disk in (("accelerator", 0, 0), ("host", keys, 0), ("disk", 0, keys)):
            print(f"{length:>8} {where:<12} {'host':<8} {host + tail:>12.0f} {disk:>12.0f} {0:>16}")
            print(f"{length:>8} {where:<12} {'lost':<8} {host:>12.0f} {disk:>12.0f} {replay:>16}")
        print(f"{length:>8} {'none':<12} {'lost':<8} {0:>12} {0:>12} {length:>16}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="a published config.json")
    arguments = parser.parse_args()
    if arguments.config is None:
        config = PolicyConfig.preset("official")
    else:
        config = PolicyConfig.from_published(json.loads(arguments.config.read_text()))
    sizes = measure(config)
    print_lengths(sizes)
    print_hits(sizes, config.sliding_window)
    print(f"main keys {sizes.main_per_token:g} B a token, index keys {sizes.index_per_token:g} B a token")
    print(f"kv_bytes_per_token {sizes.per_token:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
