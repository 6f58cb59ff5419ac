from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from envs.types import (
    FinishReason,
    Group,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.config import PolicyConfig
from model.policy import Policy
from rl.trainers import Sample

settings.register_profile("trainers", deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
settings.load_profile("trainers")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    def make(seed: int = 0) -> Policy:
        policy = Policy(PolicyConfig.preset("nano"))
        policy.reset_parameters(seed)
        return policy

    return make


@pytest.fixture
def make_turn() -> Callable[..., Turn]:
    def make(prompt: Sequence[int], completion: Sequence[int], version: int = 0, logprobs=None) -> Turn:
        return Turn(
            prompt_ids=tuple(prompt),
            completion_ids=tuple(completion),
            logprobs=tuple(logprobs if logprobs is not None else [-0.5] * len(completion)),
            policy_versions=(version,) * len(completion),
            finish=FinishReason.STOP,
            message=Message(Role.ASSISTANT, ""),
        )

    return make


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    def make(
        branches: Sequence[Sequence[Turn]], reward: float | None = 0.0, *, group=0, index=0
    ) -> Trajectory:
        return Trajectory(
            key=TrajectoryKey(f"task{group}", 50, "plain", group, index),
            branches=tuple(tuple(branch) for branch in branches),
            status=Status.FINISHED,
            stop=StopReason.ANSWER,
            score=Missing("the judge was out") if reward is None else Score(reward),
        )

    return make


@pytest.fixture
def make_group() -> Callable[..., Group]:
    def make(trajectories: Sequence[Trajectory], number: int = 0) -> Group:
        task = Task(f"task{number}", (Message(Role.USER, "?"),))
        return Group(number, task, 50, "plain", tuple(trajectories))

    return make


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    def make(ids: Sequence[int], mask: Sequence[int], **columns) -> Sample:
        count = len(ids)
        return Sample(
            token_ids=np.asarray(ids, dtype=np.int32),
            loss_mask=np.asarray(mask, dtype=bool),
            logprobs=np.asarray(columns.pop("logprobs", [0.0] * count), dtype=np.float32),
            advantages=np.asarray(columns.pop("advantages", mask), dtype=np.float32),
            policy_version=np.zeros(count, dtype=np.int32),
            **columns,
        )

    return make
