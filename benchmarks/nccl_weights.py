"""Weights from one GPU to another of the same host by NCCL, as `launcher.weights=collective` sends them.

    python -m benchmarks.nccl_weights [--gigabytes 8] [--updates 5] [--device cuda|cpu]

A learner and an engine's end, each a process with a GPU of its own, exchange versions of `--gigabytes` of
bfloat16 weights: packed on the learner's GPU, broadcast in pieces under a deadline, checked on the receiver's
GPU, copied beside the weights in use, and exchanged with them (the pause). Every version's values are looked
at on arrival. Then a buffer is damaged on purpose, which must be refused, and at last the receiver stays
away, which must be an error within the deadline. Needs no Ray. With `--device cpu` the same goes through Gloo
on one host without a GPU. The last line is

    nccl weights N bytes broadcast X GB/s, update Y GB/s, pause P ms

X counts the broadcast alone, Y all from packing to the swap; exit status 1 when a version did not arrive, a
damaged one was taken, a wait outlasted its deadline, or the pause was above 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from torch import nn

from model.engine.staging import StagedWeights
from rl.collective import CollectiveInbox, CollectiveOutbox
from rl.device_weights import DeviceSnapshot
from rl.transports import Rendezvous, StoredParcel
from rl.weights import TransferError, WeightsError

_SIDE, _DEADLINE_S, _SHORT_S, _ALLOWED_S = 8192, 60.0, 3.0, 0.05


class Weights(nn.Module):
    """So many square matrices; `fill` makes them those of a version."""

    def __init__(self, gigabytes: float, device: str) -> None:
        super().__init__()
        count = max(1, round(gigabytes * 1e9 / (2 * _SIDE * _SIDE)))
        self.layers = nn.ParameterList(
            nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=torch.bfloat16, device=device)) for _ in range(count)
        )

    def fill(self, version: int) -> None:
        """Sets matrix i to the number `_value(version, i)`."""
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                layer.fill_(_value(version, i))

    def is_version(self, version: int) -> bool:
        """Whether every number of every matrix is that of a version."""
        return all(bool((layer == _value(version, i)).all()) for i, layer in enumerate(self.layers))


def _value(version: int, layer: int) -> int:
    return 16 * version + layer % 16


class Target:
    """Takes weights as an engine does: beside the old ones, then by an exchange between two steps."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.version, self.pause_s = weights, 0, 0.0

    async def load_weights(self, tensors: Mapping[str, object], version: int) -> None:
        """Swaps the weights; the pause is the exchange."""
        staged = StagedWeights(self.weights, tensors)  # pyright: ignore[reportArgumentType]
        _wait()
        begun = time.perf_counter()
        staged.swap()
        self.version, self.pause_s = version, time.perf_counter() - begun

    def stats(self) -> dict[str, float]:
        """The length of the last pause."""
        return {"pause_seconds": self.pause_s}


def receiver(line: Connection, gigabytes: float, device: str) -> None:
    """The engine's process: takes what it is sent and says what became of it."""
    target = Target(Weights(gigabytes, _use(device)))
    inbox = CollectiveInbox(target, torch.device(device))

    async def serve() -> None:
        await inbox.join(line.recv())
        while (parcel := line.recv()) is not None:
            try:
                report = await inbox.receive(parcel)
                line.send((True, target.weights.is_version(parcel.version), report))
            except WeightsError as error:
                line.send((False, target.weights.is_version(target.version), str(error)))

    asyncio.run(serve())


def _use(device: str) -> str:
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    return device


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


async def measure(
    line: Connection, gigabytes: float, updates: int, device: str
) -> tuple[dict[str, float], list[str]]:
    """The learner: sends `updates` versions, then a damaged one, then one that nobody takes."""
    weights, version, missed = Weights(gigabytes, _use(device)), 0, []
    box = CollectiveOutbox(lambda: (weights.state_dict(), version))
    address = await asyncio.to_thread(box.meet, _DEADLINE_S)
    line.send(Rendezvous(address, 1, 2, _DEADLINE_S))
    await box.join(Rendezvous(address, 0, 2, _DEADLINE_S))
    rows: list[tuple[float, float, float, float]] = []
    for version in range(1, updates + 1):
        weights.fill(version)
        _wait()
        begun = time.perf_counter()
        _, size = box.offer()
        packed = time.perf_counter()
        line.send(box.parcel())
        await box.deliver(_DEADLINE_S)
        sent = time.perf_counter()
        taken, whole, report = await asyncio.to_thread(line.recv)
        ended = time.perf_counter()
        if not (taken and whole):
            missed.append(f"version {version} did not arrive ({report})")
            continue
        rows.append((packed - begun, sent - packed, ended - begun, report["pause_s"]))
        print(
            f"version {version}: packed {rows[-1][0]:.3f} s, broadcast {rows[-1][1]:.3f} s "
            f"({size / rows[-1][1] / 1e9:.1f} GB/s), arrived and checked {report['transfer_s']:.3f} s, "
            f"pause {1e3 * report['pause_s']:.2f} ms",
            flush=True,
        )
    snapshot = DeviceSnapshot.pack({"layers.0": weights.layers[0]}, version)
    line.send(StoredParcel(replace(snapshot.on_host(), crc32=0)))
    taken, whole, said = await asyncio.to_thread(line.recv)
    print(f"a damaged version: {said}", flush=True)
    if taken or not whole:
        missed.append("damaged weights were taken")
    begun = time.perf_counter()
    try:
        await box.deliver(_SHORT_S)
        missed.append("a broadcast without a receiver ended well")
    except TransferError as error:
        waited = time.perf_counter() - begun
        print(f"without a receiver after {waited:.1f} s: {type(error).__name__}", flush=True)
        if waited > 2 * _SHORT_S:
            missed.append(f"a deadline of {_SHORT_S:g} s took {waited:.1f} s")
    later = rows[1:] or rows
    median = [statistics.median(column) for column in zip(*later, strict=True)] if rows else [1.0] * 4
    return {
        "size": size,
        "broadcast": median[1],
        "update": median[2],
        "pause": max(r[3] for r in rows),
    }, missed


def main() -> int:
    """Measures between the first two GPUs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nccl_weights", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    devices = ("cpu", "cpu") if arguments.device == "cpu" else ("cuda:0", "cuda:1")
    if arguments.device == "cuda":
        if torch.cuda.device_count() < 2:
            print("error: two GPUs are needed; without them take --device cpu", file=sys.stderr)
            return 2
        print(f"{torch.cuda.get_device_name(0)} x2, {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
    context = multiprocessing.get_context("spawn")
    line, other = context.Pipe()
    process = context.Process(target=receiver, args=(other, arguments.gigabytes, devices[1]), daemon=True)
    process.start()
    found, missed = asyncio.run(measure(line, arguments.gigabytes, arguments.updates, devices[0]))
    process.kill()
    if found["pause"] > _ALLOWED_S:
        missed.append(f"the pause was {1e3 * found['pause']:.1f} ms")
    for text in missed:
        print(f"MISSED: {text}")
    gigabytes = found["size"] / 1e9
    print(
        f"nccl weights {found['size']:.0f} bytes broadcast {gigabytes / found['broadcast']:.1f} GB/s, "
        f"update {gigabytes / found['update']:.1f} GB/s, pause {1e3 * found['pause']:.2f} ms",
        flush=True,
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
