"""A turn that was cut off goes on with the windows that its first tokens were sampled with."""

from dataclasses import replace
from pathlib import Path

import torch

from envs.types import Message, Role, Task, TrajectoryKey
from model.config import PolicyConfig
from model.engine.sampler import SamplingParams
from model.policy import Policy
from rl.engines.base import GenerateRequest
from rl.engines.native import NativeEngine
from rl.rollout.assignment import Assignment
from rl.rollout.state import LoggedSample
from rl.rollout.wal import TokenLog

TASK = Task("t", (Message(Role.USER, "?"),))
PROMPT = tuple(range(1, 41))


def engine(log: TokenLog | None = None) -> NativeEngine:
    torch.set_num_threads(1)
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(1)
    listener = None if log is None else log.on_step
    return NativeEngine(policy, max_requests=2, max_tokens=96, exact=True, replay="bounded", on_step=listener)


def request(session: str, tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, stop_ids=frozenset(), seed=3)
    return GenerateRequest(session, 0, PROMPT, sampling)


async def test_windows_of_an_unfinished_turn_are_logged_and_used_again(tmp_path: Path) -> None:
    key = TrajectoryKey("t", 50, "loop", 0, 0)
    sample = Assignment(key=key, task=TASK, environment="calc", sampling=SamplingParams(), seed=0)
    log = TokenLog(tmp_path)
    log.start(sample)
    log.begin(sample.session, 0, PROMPT, new_branch=True)
    first = engine(log)
    part = await first.generate(request(sample.session, 6))
    await first.close()
    log.close()  # and no record says that the turn ended

    log = TokenLog(tmp_path)
    log.compact()
    log.close()
    log = TokenLog(tmp_path)
    (found,) = log.recovery.unfinished.values()
    assert isinstance(found, LoggedSample) and found.turns[0].finish is None
    assert found.turns[0].replay_starts == part.replay_starts != ()
    assert found.turns[0].token_ids == part.token_ids

    second = engine()
    whole = await second.generate(request("undisturbed", 12))
    completed = found.turns[0].completion(len(PROMPT))
    resumed = await second.generate(replace(request("resumed", 12), completed=completed))
    await second.close()
    log.close()
    assert resumed.token_ids == whole.token_ids
    assert resumed.replay_starts == whole.replay_starts == part.replay_starts
