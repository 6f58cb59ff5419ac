"""An environment of one task for agent programs, and samples of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envs.agents import result_of
from envs.definition import Definition
from envs.types import Task, TrajectoryKey
from model.engine.sampler import SamplingParams
from rl.rollout.assignment import Assignment
from sandbox.types import SandboxSpec


def assignment(index: int = 0) -> Assignment:
    task = Task.ask("t", "47*86=", gold="4042")
    key, sampling = TrajectoryKey("t", 60, "external", 3, index), SamplingParams(max_tokens=40)
    return Assignment(key=key, task=task, environment="e", sampling=sampling, seed=11)


def environment(agent: Any, sandbox: SandboxSpec | None = None) -> Any:
    def tasks(split: str, seed: int) -> Iterator[Task]:
        yield Task.ask("t", "47*86=", gold="4042")

    definition = Definition(
        "e", tasks, splits=("train",), max_turns=None, reward="", efforts=(60,), sandbox=sandbox
    )
    definition.agent(agent)

    @definition.reward
    def right(task: Task, trajectory: Any) -> float:
        return float(result_of(trajectory) == task.gold)

    return definition()
