"""The loop of a run, with a trainer and a generator that do nothing but take their time."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from envs.types import (
    Boundary,
    ErrorInfo,
    FinishReason,
    Message,
    Missing,
    Score,
    Status,
    StopReason,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.engine.sampler import SamplingParams
from rl.controller import Controller, Plan, TaskOrderError
from rl.environments import group_plan, open_stream
from rl.launch.compose import load_config
from rl.launch.run import RunState, open_run
from rl.rollout.assignment import Assignment
from rl.rollout.buffer import Batch, Buffer
from rl.rollout.dispatch import Dispatcher
from rl.watch.watch import Watch, open_watch


@dataclass
class Sides:
    """Learner and generator: every sample is right at once; `stats` and `collect` take their time.

    The first attempt at each member 0 fails, when `fails`.
    """

    stats_s: float = 0.0
    collect_s: float = 0.0
    fails: bool = False
    used: list[TrajectoryKey] = field(default_factory=list)
    done: list[Trajectory] = field(default_factory=list)
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)

    async def step(self, batch: Batch) -> dict[str, float]:
        return {}

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        self.saved[step] = json.loads(json.dumps(state))

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        failing = [a for a in assignments if self.fails and a.key.index == 0 and a.key.attempt == 0]
        self.done += [_failed(a) if a in failing else _right(a) for a in assignments]

    async def collect(self, max_wait_s: float) -> list[Trajectory]:
        await asyncio.sleep(self.collect_s)
        done, self.done = self.done, []
        return done

    async def consumed(self, keys: Sequence[TrajectoryKey]) -> None:
        self.used += keys

    async def stats(self) -> dict[str, float]:
        await asyncio.sleep(self.stats_s)
        return {}

    async def alarms(self) -> list[str]:
        return []


def _right(assignment: Assignment) -> Trajectory:
    turn = Turn((1,), (2,), (-0.5,), (0,), FinishReason.STOP, Message("assistant"))
    score = Score(float(assignment.key.index))
    return Trajectory(assignment.key, ((turn,),), Status.FINISHED, StopReason.ANSWER, score)


def _failed(assignment: Assignment) -> Trajectory:
    error = ErrorInfo(Boundary.SANDBOX, "LostError", "the sandbox went away")
    missing = Missing("lost", Boundary.SANDBOX)
    return Trajectory(assignment.key, ((),), Status.FAILED, StopReason.ERROR, missing, error)


def controller(root: Path, name: str, steps: int, sides: Sides, *more: str) -> tuple[Controller, Watch]:
    words = [
        "experiment=calc",
        f"run.root={root}",
        f"run.name={name}",
        "logger=off",
        "algorithm.group_size=2",
    ]
    words += ["rollout.groups_per_step=2", "rollout.max_in_flight=8", "rollout.staleness=100", *more]
    config = load_config(words)
    folder = open_run(config)
    folder.close(RunState.INTERRUPTED)
    watch = open_watch(folder, config)
    stream = open_stream(config)
    plan = Plan(
        steps=steps, group_size=2, scaffold="tools", sampling=SamplingParams(), run_seed=0, checkpoint_every=2
    )
    dispatcher = Dispatcher(config.rollout, lambda group: group_plan(config, stream, group))

    async def publish() -> dict[str, float]:
        return {}

    buffer = Buffer(config.rollout)
    return Controller(plan, sides, sides, publish, dispatcher, buffer, stream, watch), watch


def dispatched(run: Path) -> list[dict[str, Any]]:
    lines = (run / "rollouts" / "dispatched.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("slow", [{"stats_s": 0.1}, {"collect_s": 0.1}, {"stats_s": 0.05, "collect_s": 0.06}])
async def test_the_last_step_is_recorded_and_saved_and_none_comes_after_it(
    tmp_path: Path, slow: dict[str, float]
) -> None:
    sides = Sides(**slow)
    run, watch = controller(tmp_path, "slow", 3, sides)
    with watch:
        await run.run()
    assert [path.name for path in sorted((tmp_path / "slow" / "rollouts").glob("step-*"))] == [
        f"step-{step:06d}.jsonl" for step in (1, 2, 3)
    ]
    assert sorted(sides.saved) == [2, 3]


async def test_the_log_may_forget_attempts_that_failed_once_a_checkpoint_knows_the_next_one(
    tmp_path: Path,
) -> None:
    sides = Sides(fails=True)
    run, watch = controller(tmp_path, "fails", 2, sides, "rollout.breaker_failures=1000")
    with watch:
        await run.run()
    trained = {key.group for key in sides.used if key.attempt}
    assert len(trained) == 4
    assert {key.group for key in sides.used if key.attempt == 0 and key.index == 0} >= trained


async def test_no_group_begins_after_the_last_step_however_long_the_look_takes(tmp_path: Path) -> None:
    sides = Sides(stats_s=0.05)
    run, watch = controller(tmp_path, "look", 2, sides, "rollout.staleness=1")
    trains = asyncio.Event()

    async def step(batch: Batch) -> dict[str, float]:
        if batch.version == 1:
            trains.set()
            await asyncio.sleep(0.05)  # until the loop looks
        return {}

    async def look() -> None:
        while trains.is_set() and run.version < 2:  # noqa: ASYNC110  the loop tells nobody of its steps
            await asyncio.sleep(0)

    sides.step, run.look = step, look  # type: ignore[method-assign]
    with watch:
        await run.run()
    assert run.version == 2
    assert run.dispatcher.cursor == 6 and sides.saved[2]["dispatcher"]["cursor"] == 6


class OutOfOrderError(RuntimeError):
    """What both sides fail with at once."""


async def test_an_update_that_fails_while_the_other_side_does_is_not_left_behind(tmp_path: Path) -> None:
    sides = Sides()
    run, watch = controller(tmp_path, "both", 2, sides)
    failed = asyncio.Event()

    async def step(batch: Batch) -> dict[str, float]:
        failed.set()
        raise OutOfOrderError("the learner")

    async def collect(max_wait_s: float) -> list[Trajectory]:
        if sides.done:
            done, sides.done = sides.done, []
            return done
        await failed.wait()
        raise OutOfOrderError("the generator")

    sides.step, sides.collect = step, collect  # type: ignore[method-assign]
    unseen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    with watch, pytest.raises(OutOfOrderError, match="the generator"):
        await run.run()
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []


async def test_a_resumed_run_dispatches_the_tasks_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, half = Sides(), Sides()
    calm, watch = controller(tmp_path, "calm", 6, whole)
    with watch:
        await calm.run()
    first, watch = controller(tmp_path, "killed", 4, half)
    with watch:
        await first.run()
    again, watch = controller(tmp_path, "killed", 6, half, "resume=true")
    again.load_state_dict(half.saved[2])
    again.dispatcher.reconcile([])
    with watch:
        for group in again.dispatcher.open_groups():
            again.announce(group)
        await again.run()
    expected = dispatched(tmp_path / "calm")
    seen = {row["group"]: row for row in dispatched(tmp_path / "killed")}
    assert [row["group"] for row in expected] == list(range(len(expected)))
    common = min(len(seen), len(expected))
    assert common >= 12
    assert list(seen.values())[:common] == expected[:common]


async def test_other_tasks_than_before_are_refused(tmp_path: Path) -> None:
    sides = Sides()
    run, watch = controller(tmp_path, "first", 2, sides)
    with watch:
        await run.run()
    other, watch = controller(tmp_path, "other", 4, sides, "run.seed=9")
    other.load_state_dict(sides.saved[2] | {"tasks": {"3": ["calc/none", 50]}})
    with watch, pytest.raises(TaskOrderError, match="group 3 had task calc/none at effort 50"):
        other.announce(3)
