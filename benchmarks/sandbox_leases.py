"""What it costs that a sandbox is on disk before its owner hears of it.

    python -m benchmarks.sandbox_leases [--folder DIR] [--rounds 100]

A node writes owner, lease and key of every sandbox into its lease file, and waits for the disk. Callers that
wait at the same time share one write. Compared are one caller after the other and a burst of 64 at once.
Exits with 1 when a burst is not at least four times cheaper a sandbox, or one alone takes more than 25 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from sandbox.leases import Lease, LeaseFile

BURST, LEAST, MOST_MS = 64, 4.0, 25.0


def lease(number: int) -> Lease:
    """Returns one of the size that a run's are."""
    name = f"0123abcd-{number:012x}"
    return Lease(
        name, name, "lab/agents:run-17", 60.0, f"task {number}", "docker", "0123abcd", "0123456789abcdef"
    )


async def measure(folder: Path, rounds: int) -> tuple[list[float], list[float], float]:
    """Returns milliseconds a sandbox alone, in a burst, and how many writes a burst took."""
    leases = LeaseFile.open(folder, "boot")
    alone: list[float] = []
    for number in range(rounds):
        start = time.perf_counter()
        await leases.hold(lease(number))
        alone.append(1e3 * (time.perf_counter() - start))
    burst, before = list[float](), leases.syncs
    for number in range(max(rounds // 4, 5)):
        start = time.perf_counter()
        await asyncio.gather(*(leases.hold(lease(BURST * number + place)) for place in range(BURST)))
        burst.append(1e3 * (time.perf_counter() - start) / BURST)
    writes = (leases.syncs - before) / len(burst)
    await leases.close()
    return alone, burst, writes


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="on the disk in question (default the temporary folder)")
    parser.add_argument("--rounds", type=int, default=100)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=parsed.folder) as folder:
        alone, burst, writes = asyncio.run(measure(Path(folder), parsed.rounds))
    one, many = statistics.median(alone), statistics.median(burst)
    tail = statistics.quantiles(alone, n=20)[-1]
    print(f"one after the other: p50 {one:.2f} ms, p95 {tail:.2f} ms a sandbox")
    print(f"a burst of {BURST}: p50 {many:.3f} ms a sandbox, {writes:.1f} writes a burst")
    good = one / many >= LEAST and one <= MOST_MS
    print(
        f"durable hold {one:.2f} ms alone, {one / many:.1f}x cheaper in a burst {'ok' if good else 'MISSED'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
