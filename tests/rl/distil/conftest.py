from __future__ import annotations

import random

import pytest

from envs.types import (
    FinishReason,
    Group,
    Message,
    Missing,
    Role,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)


@pytest.fixture
def trajectories() -> list[Group]:
    """Three groups of two samples of random tokens, without a score."""
    draw = random.Random(0)
    groups = []
    for number in range(3):
        task = Task.ask(f"task/{number}", "?")
        members = []
        for index in range(2):
            prompt, sampled = ([draw.randrange(10, 60) for _ in range(draw.randint(3, 6))] for _ in range(2))
            n = len(sampled)
            turn = Turn(
                tuple(prompt),
                tuple(sampled),
                (-1.0,) * n,
                (0,) * n,
                FinishReason.STOP,
                Message(Role.ASSISTANT, ""),
            )
            key = TrajectoryKey(task.id, 50, "chat", number, index)
            members.append(
                Trajectory(key, ((turn,),), Status.FINISHED, StopReason.ANSWER, Missing("unjudged"))
            )
        groups.append(Group(number, task, 50, "chat", tuple(members)))
    return groups
