"""Kills clients, nodes, node agents and fronts at named places: `python -m benchmarks.sandbox_kills`.

Each run lets a client work in a sandbox until a process reaches a place of `sandbox_breakpoint.PLACES`, where
the victim gets SIGKILL. Then what was killed is started again, and a client that starts over asks for the
same sandbox and gives the same commands. A client or node is killed on this machine's node, a front or node
agent behind a front. Most runs use bubblewrap, the last quarter, nearly, docker where there is an engine.

Counted are orphans (processes, containers, control groups, mounts, sockets and files that are there when the
owner has released its sandboxes, or but for files when its lease has ended, after one period of the reaper),
commands that ran twice in one generation of a sandbox, and results that a client had heard or a journal held
and that come back otherwise. A command that was under way must be reported as unknown. The last line is
`kills N orphans 0 twice 0 lost 0`; the exit status is 1 when it says something else, or when a place was not
reached, or a command under way was not reported.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sandbox_breakpoint import PLACES, alive
from benchmarks.sandbox_recover import Found, Recovery
from benchmarks.sandbox_story import Account
from benchmarks.sandbox_world import World
from sandbox.reaper import PERIOD_S

VICTIMS = ("client", "node", "agent", "front")
LEASE_S, LONG_LEASE_S = 5.0, 60.0
"""Of owners that leave their sandboxes to it, and of those that release them."""

_PATIENCE_S, _RUN_S = 20.0, 150.0
_DOCKER_SHARE = 0.23


@dataclass(frozen=True, slots=True)
class Run:
    """One run: who dies where."""

    place: str
    victim: str
    backend: str

    @property
    def web(self) -> bool:
        """Whether it takes place behind a front."""
        return self.victim in ("agent", "front")


def plan(runs: int, *, docker: bool) -> list[Run]:
    """Returns the runs: each place once, victims taking turns, then the other victims; docker after that."""
    engine = round(runs * _DOCKER_SHARE) if docker else 0
    light = [*_cycle("bubblewrap", runs - engine)]
    return [*light, *_cycle("docker", engine)]


def _cycle(backend: str, count: int) -> Iterator[Run]:
    every: list[Run] = []
    for shift in range(len(VICTIMS)):
        for number, place in enumerate(PLACES):
            mortal = [victim for victim in VICTIMS if fits(place, victim)]
            if shift < len(mortal):
                every.append(Run(place, mortal[(number + shift) % len(mortal)], backend))
    for number in range(count):
        yield every[number % len(every)]


def fits(place: str, victim: str) -> bool:
    """Whether a victim can die at a place: a cut record is the node's, as is all that it does for others."""
    if place.endswith(".torn"):
        return victim == "node"
    return any("node" in hook.where or victim in hook.where for hook in PLACES[place])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed."""

    run: Run
    found: Found
    orphans: str
    clean_s: float
    reached: bool

    @property
    def holds(self) -> bool:
        """Whether all is as it should be."""
        return self.reached and not self.orphans and self.found.holds


class Bench:
    """The two small fleets of all runs."""

    def __init__(self, folder: Path, docker: Any):
        names = {False: "local", True: "web"}
        self._worlds = {web: World(folder / name, web, docker) for web, name in names.items()}
        self._started: set[bool] = set()
        self._number = 0

    async def run(self, run: Run) -> Outcome:
        """Lets a client work, the victim die, everything start over, and looks at what came of it."""
        self._number += 1
        world = await self._world(run.web)
        folder = world.folder / "runs" / str(self._number)
        folder.mkdir()
        release = run.web or self._number % 2 == 0
        account = Account(
            world.url, world.token, str(world.state), f"owner-{self._number}", run.backend, run.place,
            world.pid(run.victim), str(folder), str(world.arm), LONG_LEASE_S if release else LEASE_S,
        )  # fmt: skip
        reached = await _live(account, run, world)
        await world.restart(run.victim if reached else "client")
        gone = run.victim == "node" or account.operation == "replay"
        recovery = Recovery(account, world.state, gone=gone, node_died=run.victim == "node")
        async with asyncio.timeout(_RUN_S):
            found = await recovery.make(release=release)
            started = time.monotonic()
            orphans = await _clean(world, files=release)
            if not release:
                await recovery.release()
                orphans += await _clean(world, files=True)
        return Outcome(run, found, orphans, time.monotonic() - started, reached)

    async def _world(self, web: bool) -> World:
        if web not in self._started:
            self._started.add(web)
            await self._worlds[web].start()
        return self._worlds[web]

    async def stop(self) -> str:
        """Ends the fleets; returns what is left of them, which should be nothing."""
        left: list[str] = []
        for web in self._started:
            await self._worlds[web].stop()
            if there := await _clean(self._worlds[web], files=True):
                left.append(there)
        return "; ".join(left)

    def kill(self) -> None:
        """Ends the fleets' servers after an error; their nodes end when nobody is connected."""
        for world in self._worlds.values():
            world.kill_all()


async def _live(account: Account, run: Run, world: World) -> bool:
    """Returns whether the victim died at the place, once the client has ended."""
    victim = account.pid
    command = [sys.executable, "-m", "benchmarks.sandbox_story", str(account.write())]
    process = await asyncio.to_thread(subprocess.Popen, command)
    try:
        await asyncio.to_thread(process.wait, _RUN_S)
    finally:
        process.kill()
        process.wait()
    reached = not world.arm.exists() and not alive(victim or process.pid)
    if not reached:
        world.arm.unlink(missing_ok=True)
    return reached and (run.victim != "client" or process.returncode == -9)


async def _clean(world: World, *, files: bool) -> str:
    """Returns what is still there after one period of the reaper (and some patience with a busy machine)."""
    deadline = time.monotonic() + LEASE_S + PERIOD_S + _PATIENCE_S
    while True:
        there = await asyncio.to_thread(world.traces)
        there = there if files else there.live()
        if not there.total:
            return ""
        if time.monotonic() > deadline:
            return f"{there.total}: {there}"
        await asyncio.sleep(0.1)


async def measure(runs: list[Run], docker: Any, folder: Path) -> bool:
    """Does all runs and prints; returns whether everything holds."""
    bench = Bench(folder, docker)
    outcomes: list[Outcome] = []
    try:
        for run in runs:
            outcome = await bench.run(run)
            outcomes.append(outcome)
            _report(len(outcomes), outcome)
        left = await bench.stop()
    finally:
        bench.kill()
    _table(outcomes)
    if left:
        print(f"left when the fleets had ended: {left}")
    in_flight = sum(o.found.in_flight for o in outcomes)
    unknown = sum(o.found.unknown for o in outcomes)
    print(f"under way at a kill {in_flight}, reported as unknown {unknown}")
    print(f"longest until clean {max(o.clean_s for o in outcomes):.1f} s")
    kills, orphans = sum(o.reached for o in outcomes), sum(bool(o.orphans) for o in outcomes) + bool(left)
    twice, lost = sum(o.found.twice for o in outcomes), sum(o.found.lost for o in outcomes)
    print(f"kills {kills} orphans {orphans} twice {twice} lost {lost}")
    return not left and all(o.holds for o in outcomes)


def _report(number: int, outcome: Outcome) -> None:
    run = outcome.run
    state = "ok" if outcome.holds else "WRONG"
    print(f"{number:3d} {run.backend:10s} {run.victim:6s} at {run.place:15s} {state}", flush=True)
    for problem in (*outcome.found.problems, outcome.orphans, "" if outcome.reached else "not reached"):
        if problem:
            print(f"      {problem}", flush=True)


def _table(outcomes: list[Outcome]) -> None:
    print(f"\n{'place':16s}{''.join(f'{victim:>8s}' for victim in VICTIMS)}  orphans  twice  lost  unknown")
    for place in PLACES:
        mine = [outcome for outcome in outcomes if outcome.run.place == place]
        counts = [sum(o.reached for o in mine if o.run.victim == victim) for victim in VICTIMS]
        flights = f"{sum(o.found.unknown for o in mine)}/{sum(o.found.in_flight for o in mine)}"
        print(
            f"{place:16s}{''.join(f'{count:8d}' for count in counts)}"
            f"  {sum(bool(o.orphans) for o in mine):7d}"
            f"  {sum(o.found.twice for o in mine):5d}  {sum(o.found.lost for o in mine):4d}  {flights:>7s}"
        )


def engine() -> Any:
    """Returns a client of the Docker engine, or None where there is none."""
    import docker
    import docker.errors

    try:
        client: Any = docker.from_env()
        client.ping()
    except docker.errors.DockerException:
        return None
    return client


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox_kills", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--no-docker", action="store_true", help="all runs with bubblewrap")
    parser.add_argument("--place", choices=sorted(PLACES), help="only this one, with every victim")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("there is at least one run")
    docker = None if arguments.no_docker else engine()
    runs = plan(arguments.runs, docker=docker is not None)
    if arguments.place:
        runs = [run for run in dict.fromkeys(plan(4 * len(PLACES) * 8, docker=docker is not None))
                if run.place == arguments.place]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        holds = asyncio.run(measure(runs, docker, Path(folder)))
    if docker is not None:
        docker.close()
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
