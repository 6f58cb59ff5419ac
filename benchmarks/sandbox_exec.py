"""How long a command in a sandbox takes, against `docker exec` on the same engine in the same run.

    python -m benchmarks.sandbox_exec [--calls 100] [--backend bubblewrap]

Commands by way of the resident agent and by way of the engine's exec interface (create, start, read to the
end, inspect: what `docker exec` does, without its client) take turns, so that both see the same load. Then
the resident ones alone, at real-time priority where that is permitted: what they take on a quiet machine,
however busy this one is. Processor time is that of client, node and sandbox for one call, by the kernel's
count, without the forks made ahead of the next. The last line holds the figures; the exit status is 1 when a
resident command is less than 25 times as fast, or takes more than 2 ms at the median of the second part.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from benchmarks.sandbox_figures import timed
from benchmarks.sandbox_peers import PlainDocker
from sandbox.client import Fleet, RemoteBox
from sandbox.types import SandboxSpec

MIN_RATIO, MAX_P50_MS = 25.0, 2.0
SPEC = SandboxSpec(journal=False)
Call = Callable[[], Awaitable[object]]


def calls_of(box: RemoteBox) -> dict[str, Call]:
    """Returns the resident calls that are timed."""
    return {"exec": lambda: box.exec(["true"]), "python": lambda: box.python("print(1)")}


async def against_engine(fleet: Fleet, calls: int) -> dict[str, list[float]]:
    """Times resident calls and the engine's in turns; returns milliseconds by name."""
    plain = PlainDocker()
    times: dict[str, list[float]] = {"engine": []}
    with plain.one() as container:
        async with await fleet.create(SPEC) as box:
            for _ in range(calls):
                times["engine"].append(await timed(lambda: asyncio.to_thread(plain.exec, container)))
                for name, call in calls_of(box).items():
                    times.setdefault(name, []).append(await timed(call))
    return times


def cpu_seconds(fleet: Fleet) -> float:
    """Returns the processor time of this process and the node, with their children that have ended."""
    spent = 0.0
    for pid in (os.getpid(), fleet.node_pid):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            spent += sum(process.cpu_times()[:4])
    return spent


async def alone(fleet: Fleet, calls: int) -> dict[str, tuple[list[float], float]]:
    """Times resident calls with a pause between; returns milliseconds, and those of processor time a call."""
    found: dict[str, tuple[list[float], float]] = {}
    async with await fleet.create(SPEC) as box:
        for name, call in calls_of(box).items():
            await call()
            before, times = cpu_seconds(fleet), list[float]()
            for _ in range(calls):
                times.append(await timed(call))
                await asyncio.sleep(0.004)
            found[name] = (times, 1e3 * (cpu_seconds(fleet) - before) / calls)
    return found


def realtime() -> bool:
    """Gives this process, and what it starts, priority over the rest of the machine, if it may."""
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(10))
    except PermissionError:
        return False
    return True


async def measure(calls: int, backend: str) -> bool:
    """Runs both parts and prints; returns whether the figures hold."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        async with await Fleet.connect(state_dir=state / "a", owner="bench", backend=backend) as fleet:
            shared = await against_engine(fleet, calls)
        load = os.getloadavg()[0]
        quiet = realtime()
        async with await Fleet.connect(state_dir=state / "b", owner="bench", backend=backend) as fleet:
            own = await alone(fleet, 2 * calls)
    engine = statistics.median(shared["engine"])
    print(f"engine's exec: p50 {engine:.1f} ms (load {load:.1f})")
    figures: list[str] = []
    holds = True
    for name, (times, cpu) in own.items():
        ratio, p50 = engine / statistics.median(shared[name]), statistics.median(times)
        p95 = statistics.quantiles(times, n=20)[-1]
        beside = statistics.median(shared[name])
        print(f"{name}: beside it p50 {beside:.2f} ms; alone p50 {p50:.2f}, p95 {p95:.2f}")
        figures.append(f"{name}: {ratio:.0f}x, p50 {p50:.2f} ms, {cpu:.1f} ms of processor time")
        holds = holds and ratio >= MIN_RATIO and p50 <= MAX_P50_MS
    print(f"{backend}, {'real-time priority' if quiet else 'ordinary priority'}: {'; '.join(figures)}")
    return holds


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--backend", default="bubblewrap", choices=("docker", "bubblewrap"))
    arguments = parser.parse_args()
    raise SystemExit(0 if asyncio.run(measure(arguments.calls, arguments.backend)) else 1)


if __name__ == "__main__":
    main()
