"""A sample goes on in its own sandbox after its process, its node or its journal is gone; none runs twice."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import envs.registry
import envs.scaffolds
import rewards
from envs.registry import build, env
from envs.types import Missing, Score, Status, Task, Trajectory
from rl.rollout.assignment import Purpose
from rl.rollout.config import RolloutConfig, UnknownCommands
from rl.rollout.sandboxes import FleetSandboxes, LastingFleet
from rl.rollout.state import LoggedSample
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from sandbox.base import Sandbox
from sandbox.client import Fleet
from tests.rl.rollout.scripted import CHAT, ScriptedEngine, calc_assignment, expert, turns_of


class Gate:
    """Holds the second call of a sample back while it is shut; `reached` is set by that call."""

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.shut, self.reached = False, asyncio.Event()

    async def pass_(self) -> None:
        self.reached.set()
        while self.shut:  # noqa: ASYNC110 (opened from anywhere)
            await asyncio.sleep(0.01)


GATE = Gate()
SCRIPT = turns_of("<call>a</call>", "<call>b</call>", "<answer>1<end>")
NOTED = ["2 setup\na\n", "3 setup\na\nb\n"]


@env("notebook", splits=("train",), max_turns=3)
def notebook(split: str, seed: int) -> Iterator[Task]:
    yield Task.ask("notebook", "x=", gold="1")


@notebook.setup
async def begin(task: Task, sandbox: Sandbox) -> None:
    (await sandbox.exec("echo setup >> notes")).check()


@notebook.tool(stateless=False)
async def note(line: str, sandbox: Sandbox, number: int) -> str:
    """Adds a line and returns the whole notebook, which shows what ran twice."""
    if number == 1:
        await GATE.pass_()
    wait = "sleep 4; " if line == "slow" else ""
    command = f"echo {line} >> notes; {wait}wc -l < notes; cat notes"
    count, _, rest = (await sandbox.exec(command)).check().stdout.decode().partition("\n")
    return f"{count} {rest}"


@notebook.reward
async def right(task: Task, trajectory: object) -> float:
    return 1.0


@dataclass
class Place:
    """A folder with a node and a token log, and a client that comes and goes."""

    path: Path
    unknown: UnknownCommands = "replay"

    @asynccontextmanager
    async def client(self, name: str = "notebook", plan: object = SCRIPT) -> AsyncIterator[Client]:
        async def connect() -> Fleet:
            return await Fleet.connect(
                "local", backend="bubblewrap", state_dir=self.path / "node", owner="run", lease_s=60.0
            )

        environment = build("notebook", notebook, {}) if name == "notebook" else envs.registry.load(name)
        assert environment.sandbox is not None
        log = TokenLog(self.path / "log", flush_ms=0)
        fleet = LastingFleet(connect)
        boxes = FleetSandboxes(fleet, environment.sandbox, 1, 600.0, self.unknown)
        engine = ScriptedEngine(plan, log.on_step)  # type: ignore[arg-type]
        reward = None if name == "notebook" else rewards.load("exact")
        scaffold = envs.scaffolds.load("tools")
        worker = Worker(environment, scaffold, engine, CHAT, boxes, reward, log, RolloutConfig())
        try:
            yield Client(worker, boxes, log, fleet)
        finally:
            log.close()
            await fleet.close(release=False)


@dataclass
class Client:
    worker: Worker
    boxes: FleetSandboxes
    log: TokenLog
    fleet: LastingFleet

    @property
    def unfinished(self) -> LoggedSample:
        (sample,) = self.log.recovery.unfinished.values()
        return sample

    async def until_second_call(self) -> asyncio.Task[Trajectory]:
        """Starts a sample and returns when its second call, whose first command did not come yet, waits."""
        GATE.open()
        GATE.shut = True
        task = asyncio.create_task(self.worker.run(calc_assignment(environment="notebook")))
        reached = asyncio.create_task(GATE.reached.wait())
        await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
        assert reached.done(), task.result()
        return task

    async def kill_node(self) -> None:
        os.kill((await self.fleet.get()).node_pid, signal.SIGKILL)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    here = Place(tmp_path)
    yield here
    GATE.open()
    fleet = await Fleet.connect("local", backend="bubblewrap", state_dir=tmp_path / "node", owner="run")
    await fleet.close()


async def interrupted(place: Place) -> None:
    async with place.client() as client:
        task = await client.until_second_call()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    GATE.open()


def notes(trajectory: Trajectory) -> list[str]:
    assert trajectory.error is None, trajectory.error
    assert isinstance(trajectory.score, Score)
    return [message.content for turn in trajectory.turns for message in turn.observations]


async def test_an_interrupted_sample_goes_on_in_its_sandbox(place: Place) -> None:
    await interrupted(place)
    async with place.client() as client:
        sample = client.unfinished
        assert sample.place is not None
        assert (sample.place.generation, sample.place.position) == (1, 2)
        assert notes(await client.worker.run(sample.assignment, sample)) == NOTED
        assert client.boxes.counts == {"attached": 1, "fast_forwarded": 2, "renewed": 0, "replayed": 0}
        assert await (await client.fleet.get()).boxes() == []


async def test_when_the_sandbox_is_gone_it_is_made_anew_from_its_journal(place: Place) -> None:
    await interrupted(place)
    async with place.client() as client:
        await client.kill_node()
    async with place.client() as client:
        sample = client.unfinished
        assert notes(await client.worker.run(sample.assignment, sample)) == NOTED
        assert client.boxes.counts["renewed"] == 1
        assert client.boxes.counts["replayed"] == 2
        assert client.boxes.counts["rebuilt"] == 0


async def test_without_a_journal_what_was_done_runs_again_and_is_compared(place: Place) -> None:
    await interrupted(place)
    async with place.client() as client:
        await client.kill_node()
    shutil.rmtree(place.path / "node" / "journals")
    async with place.client() as client:
        sample = client.unfinished
        assert notes(await client.worker.run(sample.assignment, sample)) == NOTED
        assert client.boxes.counts["rebuilt"] == 1


async def test_a_killed_node_under_a_living_sample_costs_no_attempt(place: Place) -> None:
    async with place.client() as client:
        task = await client.until_second_call()
        await client.kill_node()
        GATE.open()
        assert notes(await task) == NOTED
        assert client.boxes.counts["renewed"] == 1
        assert client.fleet.reconnects == 1


async def test_a_stateless_call_is_made_again_when_its_node_was_killed(place: Place) -> None:
    async with place.client("calc", expert) as client:
        assert (await client.worker.run(calc_assignment(group=1))).status is Status.FINISHED
        await client.kill_node()
        again = await client.worker.run(calc_assignment(group=2))
        assert (again.status, again.error) == (Status.FINISHED, None)
        assert client.fleet.reconnects == 1


@notebook.cleanup
async def end(task: Task, sandbox: Sandbox) -> None:
    (await sandbox.exec("true")).check()


async def test_an_evaluation_never_gets_a_sandbox_of_an_earlier_one(place: Place) -> None:
    GATE.open()
    for _ in range(2):
        async with place.client() as client:
            assignment = calc_assignment(environment="notebook", purpose=Purpose.EVAL)
            task = asyncio.create_task(client.worker.run(assignment))
            assert notes(await task) == NOTED


SLOW = turns_of("<call>slow</call>", "<answer>1<end>")


async def under_way(place: Place) -> None:
    """Leaves a sample whose only command was sent and did not end."""
    GATE.open()
    async with place.client(plan=SLOW) as client:
        task = asyncio.create_task(client.worker.run(calc_assignment(environment="notebook")))
        while not task.done() and not _sent(place):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _sent(place: Place) -> bool:
    journals = (place.path / "node" / "journals").rglob("*")
    return any(b"echo slow" in file.read_bytes() for file in journals if file.is_file())


async def test_a_command_that_was_under_way_runs_in_a_sandbox_made_anew(place: Place) -> None:
    await under_way(place)
    async with place.client(plan=SLOW) as client:
        sample = client.unfinished
        trajectory = await client.worker.run(sample.assignment, sample)
        assert notes(trajectory) == ["2 setup\nslow\n"]
        assert (client.boxes.counts["renewed"], client.boxes.counts["replayed"]) == (1, 1)


async def test_a_command_that_was_under_way_can_be_refused(tmp_path: Path, place: Place) -> None:
    place.unknown = "fail"
    await under_way(place)
    async with place.client(plan=SLOW) as client:
        sample = client.unfinished
        trajectory = await client.worker.run(sample.assignment, sample)
        assert isinstance(trajectory.score, Missing)
        assert trajectory.error is not None
        assert trajectory.error.type == "UnknownOutcomeError"
