"""Kills at places that are reached for certain, and what is counted after them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.sandbox_breakpoint import PLACES, Arm, Trigger
from benchmarks.sandbox_kills import VICTIMS, Bench, Run, engine, fits, plan
from benchmarks.sandbox_traces import traces
from benchmarks.sandbox_world import World
from sandbox.client import Fleet
from sandbox.types import Limits, SandboxSpec

SMALL = SandboxSpec(limits=Limits(memory_bytes=64 << 20))


async def until_none(left: Callable[[], object]) -> None:
    for _ in range(300):
        if not left():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(left())


def test_a_hundred_runs_have_every_victim_at_every_place() -> None:
    runs = plan(100, docker=True)
    light = {(run.victim, run.place) for run in runs if run.backend == "bubblewrap"}
    assert light == {(victim, place) for victim in VICTIMS for place in PLACES if fits(place, victim)}
    assert len(runs) == 100 and sum(run.backend == "docker" for run in runs) == 23
    assert min(sum(run.victim == victim for run in runs) for victim in VICTIMS) >= 12
    assert {run.place for run in plan(len(PLACES), docker=False)} == {*PLACES}
    assert all(len({place for place in PLACES if fits(place, victim)}) >= 12 for victim in VICTIMS)


def test_a_place_lets_passes_by_and_is_reached_once(tmp_path: Path) -> None:
    arm, trigger = Arm("exec.ended", 1, passes=1), Trigger(tmp_path / "arm")
    assert trigger.pulled("exec.ended") is None
    for _ in range(2):
        arm.write(tmp_path / "arm")
        assert trigger.pulled("exec.ended") is None and trigger.pulled("exec.called") is None
        assert trigger.pulled("exec.ended") == arm
        assert trigger.pulled("exec.ended") is None and not (tmp_path / "arm").exists()


async def test_traces_name_what_a_killed_node_leaves(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with await Fleet.connect(state_dir=state, owner="me", backend="bubblewrap") as fleet:
        box = await fleet.create(SMALL)
        await box.start("sleep 600")
        await box.exec("until pidof sleep; do :; done")
        found = traces(state, [fleet.node_pid])
        assert len(found.processes) >= 3 and found.files == (f"journals/{box.id}",)
        assert any("sleep 600" in process for process in found.processes), found
        assert bool(found.cgroups) is fleet.capabilities.process_limit
        assert not found.sockets and found.live().files == ()
        node = fleet.node_pid
        os.kill(node, signal.SIGKILL)
    left = traces(state, [node])
    assert left.sockets == () and (str(node) in str(left.cgroups)) is fleet.capabilities.process_limit
    async with await Fleet.connect(state_dir=state, owner="me", backend="bubblewrap") as fleet:
        pass  # a release deletes the journals of sandboxes that are gone as well
    await until_none(lambda: traces(state, [node, fleet.node_pid]).total)


@pytest.mark.docker
async def test_traces_name_containers(tmp_path: Path) -> None:
    docker = engine()
    async with await Fleet.connect(state_dir=tmp_path, owner="me", backend="docker") as fleet:
        await fleet.create(SMALL)
        assert len(traces(tmp_path, [fleet.node_pid], docker=docker).containers) == 1
    await until_none(lambda: traces(tmp_path, [], docker=docker).containers)
    docker.close()


async def test_nothing_is_orphaned_lost_or_run_twice(tmp_path: Path) -> None:
    bench = Bench(tmp_path, None)
    try:
        for victim, place, unknown in (("node", "exec.torn", 1), ("client", "snapshot.saved", 0)):
            outcome = await bench.run(Run(place, victim, "bubblewrap"))
            assert outcome.holds and outcome.found.unknown == unknown, outcome
        outcome = await bench.run(Run("exec.never", "node", "bubblewrap"))
        assert not outcome.reached and not outcome.holds
        assert await bench.stop() == ""
    finally:
        bench.kill()


async def test_what_stays_is_counted(tmp_path: Path) -> None:
    world = World(tmp_path / "world", web=False)
    await world.start()
    try:
        (world.state / "snapshots").mkdir()
        (world.state / "snapshots" / "snap-1.tree").touch()
        assert world.traces().files == ("snapshots/snap-1.tree",)
        await world.restart("node")  # which sweeps what has no record
        assert not world.traces().total
    finally:
        await world.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_place_once() -> None:
    command = [sys.executable, "-m", "benchmarks.sandbox_kills", "--no-docker", "--runs", str(len(PLACES))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == f"kills {len(PLACES)} orphans 0 twice 0 lost 0"
