import pytest

from envs.types import (
    FinishReason,
    Message,
    Missing,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)


@pytest.fixture
def task():
    return Task.ask("t", "6*7=", gold="42")


@pytest.fixture
def answered():
    """Makes a finished trajectory whose only turn answers a text."""

    def make(text):
        turn = Turn((1,), (2,), (0.0,), (0,), FinishReason.STOP, Message("assistant", text))
        key = TrajectoryKey("t", 50, "chat", 0, 0)
        return Trajectory(key, ((turn,),), Status.FINISHED, StopReason.ANSWER, Missing("not judged"))

    return make
