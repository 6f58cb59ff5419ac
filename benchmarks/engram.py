"""N-gram tables outside the accelerator: is the result the same, and is their gathering hidden?

A policy with large tables runs a training step, a prefill in chunks and decoding, with resident tables, with
tables in host memory, and with tables mapped from the checkpoint's file (once dropped from the page cache
before). Rows are gathered in a background thread from the moment the token ids are known; a layer that needs
them earlier waits. Printed for each: bytes of rows read, time to gather them, the part of it that no layer
waited for, first over all and then for each layer. Exits 1 unless every hidden state and every table gradient
is that of resident tables, bit for bit.

    python -m benchmarks.engram [--rows 600000] [--tokens 2048] [--dtype float32]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import load_policy, save_policy
from model.config import PolicyConfig
from model.layers.engram_hash import bucket_primes
from model.layers.engram_table import EngramTable, TableStorage, Traffic
from model.policy import PackedTokens, Policy

_VOCABULARY = 4096
_CHUNK = 256
_DECODED = 32
_PHASES = ("training", "prefill", "decode")


def configuration(rows: int, dtype: str) -> PolicyConfig:
    """Eight layers of 256, with tables of about `rows` rows of 64 in layers 1 and 4."""
    config = replace(
        PolicyConfig.preset("nano"),
        vocab_size=_VOCABULARY,
        hidden_size=256,
        num_hidden_layers=8,
        compress_ratios=(0, 2, 2, 2, 2, 1, 1, 1),
        kv_source_layer_ids=(1, 5),
        index_source_layer_ids=(1, 5, 6),
        candidate_source_layer_id=5,
        max_position_embeddings=1 << 16,
        engram_layer_ids=(1, 4),
        engram_n_heads=4,
        engram_head_dim=64,
        engram_vocab_size=max(rows // 12, 2),
        engram_compressed_vocab_size=_VOCABULARY,
        engram_token_map=tuple(range(_VOCABULARY)),
        dtype=dtype,
    )
    tables = tuple(sum(map(sum, primes)) for primes in bucket_primes(config))
    return replace(config, engram_num_embeddings=tables)


def tables(policy: Policy) -> dict[int, EngramTable]:
    """The tables by layer."""
    return {block.layer: block.engram.embed for block in policy.blocks if block.engram is not None}


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy computed, and the traffic of each phase by layer."""

    values: dict[str, list[Tensor]]
    traffic: dict[str, dict[int, Traffic]]


def run(policy: Policy, ids: Tensor) -> Result:
    """A training step, a prefill in chunks and decoding of the same ids."""
    values: dict[str, list[Tensor]] = {}
    traffic: dict[str, dict[int, Traffic]] = {}
    for phase in _PHASES:
        for table in tables(policy).values():
            table.traffic = Traffic()
        values[phase] = _train(policy, ids) if phase == "training" else _extend(policy, ids, phase)
        traffic[phase] = {layer: table.traffic for layer, table in tables(policy).items()}
    return Result(values, traffic)


def _train(policy: Policy, ids: Tensor) -> list[Tensor]:
    hidden = policy(PackedTokens(ids, torch.tensor([0, ids.shape[0]]))).hidden
    weights = torch.linspace(-1, 1, hidden.shape[1], dtype=hidden.dtype)
    (hidden * weights).sum().backward()
    values = [hidden.detach()]
    for table in tables(policy).values():
        if table.weight is not None and table.weight.grad is not None:
            grad = table.weight.grad.coalesce()
            values += [grad.indices(), grad.values()]
    policy.zero_grad(set_to_none=True)
    return values


@torch.inference_mode()
def _extend(policy: Policy, ids: Tensor, phase: str) -> list[Tensor]:
    cache = policy.new_cache(1, ids.shape[0] + 1)
    slots, values = torch.tensor([cache.allocate()]), []
    bounds = list(range(0, ids.shape[0], _CHUNK))
    if phase == "decode":
        bounds = list(range(_DECODED))
    for begin, end in zip(
        bounds, [*bounds[1:], bounds[-1] + 1 if phase == "decode" else ids.shape[0]], strict=True
    ):
        part = ids[None, begin:end]
        values.append(policy.extend(cache, slots, part, torch.tensor([end - begin])))
    return values


def same(expected: Result, found: Result, storage: TableStorage) -> bool:
    """Whether all values are equal; a mapped table has no gradient."""
    return all(
        torch.equal(first, second)
        for phase in _PHASES
        for first, second in zip(
            expected.values[phase][:1]
            if storage == "mmap" and phase == "training"
            else expected.values[phase],
            found.values[phase],
            strict=True,
        )
    )


def _rows(name: str, result: Result) -> Iterator[str]:
    for phase, layers in result.traffic.items():
        for layer, traffic in layers.items():
            yield (
                f"{name:<12} {phase:<9} {layer:>5} {traffic.bytes / 1e6:>9.2f} "
                f"{traffic.gather_seconds * 1e3:>10.2f} {traffic.wait_seconds * 1e3:>9.2f} "
                f"{100 * traffic.hidden:>7.0f}%"
            )


def _drop_from_memory(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def main() -> int:
    """Measure, compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=600_000, help="rows a table")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = configuration(arguments.rows, arguments.dtype)
    ids = torch.randint(0, _VOCABULARY, (arguments.tokens,), generator=torch.Generator().manual_seed(0))
    equal, total = True, Traffic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_policy(Policy(config), folder)
        expected = run(load_policy(folder), ids)
        print(f"tables of {config.engram_num_embeddings} rows of {config.engram_head_dim}, {arguments.dtype}")
        heads = f"{'MB read':>9} {'gather ms':>10} {'wait ms':>9} {'hidden':>8}"
        print(f"{'tables':<12} {'phase':<9} {'layer':>5} {heads}")
        _drop_from_memory(folder)
        runs: list[tuple[str, TableStorage]] = [("mmap, cold", "mmap"), ("mmap", "mmap"), ("host", "host")]
        for label, storage in runs:
            found = run(load_policy(folder, tables=storage), ids)
            print("\n".join(_rows(label, found)))
            equal = equal and same(expected, found, storage)
            for traffic in (t for layers in found.traffic.values() for t in layers.values()):
                total.bytes += traffic.bytes
                total.gather_seconds += traffic.gather_seconds
                total.wait_seconds += traffic.wait_seconds
    print("the results are those of resident tables" if equal else "the results DIFFER from resident tables")
    gathered = f"{1e3 * total.gather_seconds:.0f} ms for {total.bytes / 1e6:.0f} MB"
    print(f"engram hidden {100 * total.hidden:.0f}% of {gathered}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
