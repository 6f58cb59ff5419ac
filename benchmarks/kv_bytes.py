"""How many bytes of cache a token costs, from buffers that are really allocated.

    python -m benchmarks.kv_bytes [--config FILE]

A packed cache with a few pages is allocated at the widths of a published `config.json` (the released model
without one). Compressed keys cost a fixed number of bytes a token; the windows and the open groups a fixed
number a sequence. The tables are computed from these sizes: what a sequence keeps on the accelerator, what
of it is worth keeping in host memory (the encoder's windows) and on disk (compressed keys alone), and what a
returning sequence would fetch and replay. The last line is the measured figure for compressed keys.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

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
    encoder_window: int
    """Those of the layers before the last KV source, the ones a returning sequence can use."""
    open_groups: int
    """A sequence's open compression groups."""

    @property
    def per_token(self) -> float:
        """Compressed keys of a token, main and index keys of all layers."""
        return self.main_per_token + self.index_per_token

    def persistent(self, length: int) -> float:
        """Bytes on disk of `length` tokens."""
        return self.per_token * length

    def resident(self, length: int) -> float:
        """Bytes on the accelerator of a sequence of `length` tokens."""
        return self.persistent(length) + self.window + self.open_groups


def measure(config: PolicyConfig) -> CacheBytes:
    """Allocate a small packed cache of `config` and read its buffers' sizes."""
    dtype, device = getattr(torch, config.dtype), torch.device("cpu")
    cache = PolicyCache(config, 1, 1, dtype, device, "packed", _PAGES, slack=0)
    assert cache.pages is not None
    # The page that is never handed out has buffers too, and as many tokens' worth.
    tokens = (_PAGES + 1) * cache.pages.page_tokens
    encoder_layers = max(config.kv_source_layer_ids)
    return CacheBytes(
        sum(storage.nbytes for storage in cache.main.values()) / tokens,
        sum(storage.nbytes for storage in cache.index_keys.values()) / tokens,
        cache.windows.nbytes,
        cache.windows.nbytes // config.num_hidden_layers * encoder_layers,
        sum(pending.nbytes for pending in cache.pending.values()),
    )


def print_lengths(sizes: CacheBytes) -> None:
    """What a sequence keeps, by its length and the tier."""
    print(f"a sequence: windows {sizes.window} B ({sizes.encoder_window} B before the decoder), ", end="")
    print(f"open groups {sizes.open_groups} B")
    names = f"{'accelerator B':>14} {'host B':>9} {'disk B':>12} {'B/token':>8} {'window B/token':>15}"
    print(f"{'tokens':>8} {names}")
    for length in LENGTHS:
        resident, persistent = sizes.resident(length), sizes.persistent(length)
        print(
            f"{length:>8} {resident:>14.0f} {sizes.encoder_window:>9} {persistent:>12.0f} "
            f"{resident / length:>8.0f} {sizes.window / length:>15.0f}"
        )


def print_hits(sizes: CacheBytes, window: int) -> None:
    """What a sequence that comes back has to fetch from each tier and to run again."""
    names = f"{'disk B':>12} {'host B':>9} {'encoder tokens':>15} {'decoder tokens':>15}"
    print(f"{'tokens':>8} {'hit':<22} {names}")
    for length in LENGTHS:
        replay = min(window, length)
        keys = sizes.persistent(length)
        for name, disk, host, encoder in (
            ("keys and windows", keys, sizes.encoder_window, 0),
            ("keys, windows lost", keys, 0, replay),
            ("none", 0, 0, length),
        ):
            print(f"{length:>8} {name:<22} {disk:>12.0f} {host:>9} {encoder:>15} {replay:>15}")


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
