"""How much best-effort sandboxes slow down the commands of a sensitive one, with and without the class.

    python -m benchmarks.sandbox_latency [--rounds 8] [--calls 25] [--backend bubblewrap]

Sandboxes that compute without end are the load: at 50 % one for every two cores, each with a core at most, at
full load two for each core. Half of them are best-effort sandboxes, half of the ordinary (sensitive) class.
Those that a phase does not need are paused. The phases take turns, round by round, so that all see the same
machine: no load, then either load by either class. Inflation is how much longer a command's round trip is at
the mean than without load. The last line holds the figures; the exit status is 1 unless the class takes at
least half of the inflation at full load, and adds none at 50 %.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from sandbox.client import Fleet, RemoteBox
from sandbox.types import Latency, Limits, SandboxSpec

MAX_SHARE, SLACK = 0.5, 0.1
"""What may be left of the inflation without the class at full load; by how much it may differ at half."""

CORES = os.cpu_count() or 1
LOADS = {"50%": max(CORES // 2, 1), "full": 2 * CORES}
CLASSES: tuple[Latency, Latency] = ("sensitive", "best_effort")
BURN = ["python3", "-c", "while True: pass"]
SETTLE_S = 0.2


async def burners(fleet: Fleet, latency: Latency) -> list[RemoteBox]:
    """Returns paused sandboxes that compute when they are not."""
    made: list[RemoteBox] = []
    for _ in range(max(LOADS.values())):
        limits = Limits(cpus=1.0, memory_bytes=64 << 20, tmpfs_bytes=1 << 20)
        box = await fleet.create(SandboxSpec(journal=False, latency=latency, limits=limits))
        await box.start(BURN)
        await box.pause()
        made.append(box)
    return made


async def round_trips(box: RemoteBox, calls: int) -> list[float]:
    """Returns how many milliseconds commands take, one after the other with a pause between."""
    times: list[float] = []
    for _ in range(calls):
        start = time.perf_counter()
        assert (await box.exec(["true"])).exit_code == 0
        times.append(1e3 * (time.perf_counter() - start))
        await asyncio.sleep(0.005)
    return times


async def under(load: list[RemoteBox], box: RemoteBox, calls: int) -> list[float]:
    """Returns the round trips beside a load."""
    await asyncio.gather(*(burner.resume() for burner in load))
    await asyncio.sleep(SETTLE_S)
    try:
        return await round_trips(box, calls)
    finally:
        await asyncio.gather(*(burner.pause() for burner in load))


async def measure(backend: str, rounds: int, calls: int) -> dict[str, list[float]]:
    """Returns the round trips of all phases by name."""
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with await Fleet.connect(state_dir=Path(folder), owner="bench", backend=backend) as fleet:
            box = await fleet.create(SandboxSpec(journal=False))
            loads = {latency: await burners(fleet, latency) for latency in CLASSES}
            await round_trips(box, calls)
            for _ in range(rounds):
                times.setdefault("none", []).extend(await under([], box, calls))
                for name, count in LOADS.items():
                    for latency in CLASSES:
                        got = await under(loads[latency][:count], box, calls)
                        times.setdefault(f"{name} {latency}", []).extend(got)
    return times


def judge(times: dict[str, list[float]]) -> tuple[str, bool]:
    """Returns the figures, and whether the class helps."""
    idle = statistics.mean(times["none"])
    excess = {name: statistics.mean(of) / idle - 1 for name, of in times.items()}
    figures: list[str] = []
    holds = True
    for name in LOADS:
        plain, helped = (excess[f"{name} {latency}"] for latency in CLASSES)
        figures.append(f"inflation at {name} load {100 * plain:.1f} % -> {100 * helped:.1f} % with the class")
        holds = holds and helped <= (MAX_SHARE * plain if name == "full" else plain + SLACK)
    return "; ".join(figures), holds


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=25)
    parser.add_argument("--backend", default="bubblewrap", choices=("docker", "bubblewrap"))
    arguments = parser.parse_args()
    times = asyncio.run(measure(arguments.backend, arguments.rounds, arguments.calls))
    for name, of in times.items():
        p95 = statistics.quantiles(of, n=20)[-1]
        print(f"{name}: mean {statistics.mean(of):.2f}, p50 {statistics.median(of):.2f}, p95 {p95:.2f} ms")
    figures, holds = judge(times)
    print(f"{arguments.backend}, {CORES} cores, load {os.getloadavg()[0]:.1f}: {figures}")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
