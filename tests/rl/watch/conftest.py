from __future__ import annotations

from collections.abc import Callable

import pytest

from envs.types import (
    Boundary,
    ErrorInfo,
    FinishReason,
    Group,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from rl.rollout.buffer import Batch

Make = Callable[..., Trajectory]


def make(group: int, index: int, reward: float | None, *, tool: bool = False, effort: int = 50) -> Trajectory:
    calls = (ToolCall("python", {"expression": "2*3"}, "call_0", 0),) if tool else ()
    turn = Turn(
        (11, 12),
        (13, 14 + index),
        (-0.1, -0.2),
        (3, 4),
        FinishReason.STOP,
        Message(Role.ASSISTANT, "6", calls),
    )
    key = TrajectoryKey("calc/2*3", effort, "tools", group, index)
    score = Missing("no verdict", Boundary.REWARD) if reward is None else Score(reward, {"outcome": reward})
    return Trajectory(key, ((turn,),), Status.FINISHED, StopReason.ANSWER, score)


@pytest.fixture
def batch() -> Batch:
    task = Task.ask("calc/2*3", "2*3=", gold="6")
    mixed = Group(0, task, 50, "tools", (make(0, 0, 1.0, tool=True), make(0, 1, 0.0), make(0, 2, None)))
    right = Group(1, task, 50, "tools", (make(1, 0, 1.0, tool=True), make(1, 0, 1.0)))
    return Batch((mixed, right), version=4, min_version=4, sampled_tokens=10, masked_tokens=5)


@pytest.fixture
def failed() -> Trajectory:
    key = TrajectoryKey("calc/2*3", 50, "tools", 2, 0)
    error = ErrorInfo(Boundary.SANDBOX, "LostError", "the sandbox went away")
    return Trajectory(key, ((),), Status.FAILED, StopReason.ERROR, Missing("lost", Boundary.SANDBOX), error)
