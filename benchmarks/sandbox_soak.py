"""Hours of use in miniature: `python -m benchmarks.sandbox_soak [--minutes 20]`.

Workers at once (8, one of them on docker where there is an engine) create sandboxes and delete them. In
between they run commands, write and read files, fork, snapshot, pause, run into time limits, lose sandboxes
to SIGKILL, cancel commands, and go away without a word until their lease has ended. Every ten seconds they
stop between two sandboxes. Then memory, open files, threads and tasks of node and client are read, the disk
of the state folder, and what deleted sandboxes have left: processes, containers, control groups, mounts,
sockets. A line through the second half of the readings may rise by no more than its bound: for each process
8 MiB of memory and 4 open files (the node keeps connections to the engine, at times more of them), 2 MiB of
disk, 2 of anything else. The last line has the growth an hour. The exit status is 1 when something grows, or
when a life of a sandbox went otherwise than it should.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.sandbox_kills import engine
from benchmarks.sandbox_soak_samples import BOUNDS, Growth, Sampler, draw, growths
from benchmarks.sandbox_soak_work import Workers
from sandbox.client import Fleet

EVERY_S = 10.0
_LEAST = 6
_THREADS = 8


async def fill(threads: int) -> None:
    """Starts all threads of the loop's pool, which would come one by one as they are needed together."""
    together = threading.Barrier(threads)
    await asyncio.gather(*(asyncio.to_thread(together.wait) for _ in range(threads)))


async def soak(
    folder: Path, seconds: float, width: int, every_s: float, docker: Any
) -> tuple[Sampler, Workers]:
    """Works for `seconds` and takes a sample every `every_s`."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    await fill(_THREADS)
    state = folder / "state"
    await asyncio.to_thread(_start_node, state)
    light = await Fleet.connect(state_dir=state, owner="light", backend="bubblewrap")
    heavy = await Fleet.connect(state_dir=state, owner="heavy", backend="docker") if docker else None
    sampler = Sampler(state, light.node_pid, docker)
    workers = Workers(state, light, heavy, width)
    try:
        await workers.warm_up()
        workers.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(min(every_s, max(end - time.monotonic(), 0.0)))
            async with workers.stopped():
                sample = await sampler.take()
            print(
                f"{sample.at_s:6.0f} s {workers.operations:7d} operations, node {sample.node_memory_mib:.1f} "
                f"MiB {sample.node_fds:.0f} fds, client {sample.client_memory_mib:.1f} MiB "
                f"{sample.client_fds:.0f} fds, disk {sample.disk_mib:.1f} MiB",
                flush=True,
            )
    finally:
        await workers.stop()
        for fleet in (light, heavy):
            if fleet is not None:
                await fleet.close()
    return sampler, workers


def _start_node(state: Path) -> None:
    state.mkdir(parents=True, mode=0o700)
    command = [sys.executable, "-m", "benchmarks.sandbox_soak", "--node", str(state), "--detach"]
    root = str(Path(__file__).parents[1])
    with (state / "node.log").open("ab") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, check=False, env={**os.environ, "PYTHONPATH": root}
        )
    assert done.stdout == b"ready", (state / "node.log").read_text()[-2000:]


def _run_node(words: list[str]) -> None:
    """Runs a node that has all its threads, and writes its number of tasks to `observed` upon SIGUSR1."""
    from sandbox import node

    serve = node.Node.serve

    async def observed(self: node.Node, ready: int | None = None) -> None:
        path = self.state_dir / "observed"

        def write() -> None:
            path.with_suffix(".draft").write_text(str(len(asyncio.all_tasks())))
            path.with_suffix(".draft").replace(path)

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write)
        await fill(node.threads(self.limits))
        await serve(self, ready)

    node.Node.serve = observed
    sys.argv = ["sandbox.node", *words]
    node.main()


def report(found: list[Growth]) -> None:
    """Prints the growth of each figure beside its bound."""
    print(f"\n{'figure':20s}{'in the second half':>20s}{'bound':>8s}{'an hour':>10s}")
    for growth in found:
        mark = "" if growth.holds else "  GROWS"
        print(f"{growth.name:20s}{growth.rise:20.2f}{BOUNDS[growth.name]:8.1f}{growth.per_hour:10.1f}{mark}")


def main() -> None:
    """Soaks, draws and prints."""
    if sys.argv[1:2] == ["--node"]:
        return _run_node(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox_soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--width", type=int, default=8, help="workers at once")
    parser.add_argument("--every-s", type=float, default=EVERY_S, help="seconds between samples")
    parser.add_argument("--no-docker", action="store_true", help="all workers on bubblewrap")
    parser.add_argument("--picture", type=Path, default=Path("sandbox_soak.png"))
    parser.add_argument("--samples", type=Path, help="file for the samples, as JSON lines")
    arguments = parser.parse_args()
    if 60 * arguments.minutes < _LEAST * arguments.every_s:
        parser.error(f"growth needs at least {_LEAST} samples: run longer, or sample more often (--every-s)")
    docker = None if arguments.no_docker else engine()
    with tempfile.TemporaryDirectory() as folder:
        sampler, workers = asyncio.run(
            soak(Path(folder), 60 * arguments.minutes, arguments.width, arguments.every_s, docker)
        )
    if docker is not None:
        docker.close()
    if arguments.samples:
        sampler.save(arguments.samples)
    draw(sampler.samples, arguments.picture)
    if len(sampler.samples) < _LEAST:
        raise SystemExit(f"{len(sampler.samples)} samples are too few for a line: run longer")
    found = growths(sampler.samples)
    report(found)
    for name, count in sorted(workers.cycles.items()):
        print(f"{name:12s}{count:8d} sandboxes or groups")
    for problem in workers.problems[:10]:
        print(f"failed: {problem}")
    hourly = {growth.name: growth.per_hour for growth in found}
    memory = hourly["node_memory_mib"] + hourly["client_memory_mib"]
    print(
        f"soak minutes {arguments.minutes:g} ops {workers.operations} growth memory {memory:.1f} MiB/h "
        f"fds {hourly['node_fds'] + hourly['client_fds']:.1f} "
        f"threads {hourly['node_threads'] + hourly['client_threads']:.1f} "
        f"tasks {hourly['node_tasks'] + hourly['client_tasks']:.1f} containers {hourly['containers']:.1f} "
        f"mounts {hourly['mounts']:.1f} cgroups {hourly['cgroups']:.1f} disk {hourly['disk_mib']:.1f} MiB/h"
    )
    raise SystemExit(0 if all(growth.holds for growth in found) and not workers.problems else 1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
