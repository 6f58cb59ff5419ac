"""A step of reinforcement on a card: engine and trainer on kernels, exact and fast."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.model_gpu_setup import configuration, policy_on_gpu
from envs.types import (
    FinishReason,
    Group,
    Message,
    Replay,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.ops.dispatch import paths
from model.policy import Policy
from rl.algorithms import AlgorithmConfig
from rl.checkpoint import CheckpointStore
from rl.rollout.recorded import pack
from rl.trainers import RLConfig, RLTrainer

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(3, 3 + length)) for length in (5, 90, 33, 64)]


def sampled_group(policy, version, tokens=40, **sampling):
    """Four samples of each prompt, rewarded by turns, with all that training has to know of them."""
    engine = Engine(policy, max_requests=16, max_tokens=160, prefill_tokens=64, storage="packed")
    engine.set_version(version)
    prompts = {
        engine.submit(
            Request(f"s{i}", PROMPTS[i % 4], SamplingParams(max_tokens=tokens, seed=i, **sampling))
        ): i
        for i in range(16)
    }
    ended = {}
    while engine.has_work:
        ended |= {prompts[f.request_id]: f.turn for f in engine.step().finished}
    trajectories = [trajectory(i, PROMPTS[i % 4], turn) for i, turn in sorted(ended.items())]
    return Group(0, Task("task", (Message(Role.USER, "?"),)), 50, "plain", tuple(trajectories))


def trajectory(index, prompt, turn):
    mask = turn.sampling_mask
    kept = {}
    if mask is not None:
        kept = {
            "kept_counts": pack(np.diff(mask.offsets.cpu()), "u4"),
            "kept_ids": pack(mask.ids.cpu(), "i4"),
        }
    only = Turn(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(turn.token_ids.tolist()),
        logprobs=tuple(turn.logprobs.tolist()),
        policy_versions=tuple(turn.versions.tolist()),
        finish=FinishReason.STOP,
        message=Message(Role.ASSISTANT, ""),
        replay_starts=turn.replay_starts,
        replay=Replay(states=pack(turn.states, "u1"), **kept),
    )
    return Trajectory(
        key=TrajectoryKey("task", 50, "plain", 0, index),
        branches=((only,),),
        status=Status.FINISHED,
        stop=StopReason.ANSWER,
        score=Score(float(index % 3 == 0)),
    )


def narrow_policy():
    narrow = {"hidden_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128, "o_lora_rank": 64}
    policy = Policy(replace(configuration(), **narrow))
    policy.reset_parameters(0)
    return policy.cuda()


def made_trainer(policy, scales_every=0):
    policy.fake_quant = True
    config = RLConfig(token_budget=512, replay_choices="off", scales_every=scales_every)
    return RLTrainer(policy, config, AlgorithmConfig())


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}])
def test_in_exact_mode_trainer_and_engine_agree_to_the_last_bit_step_after_step(sampling):
    policy = policy_on_gpu()
    trainer = made_trainer(policy)
    for exact in (True, False, True):
        policy.exact = exact
        before = policy.head.weight.detach().clone()
        found = trainer.step([sampled_group(policy, trainer.version, **sampling)])
        assert found["train/kl.mismatch.own.tokens"] == found["train/kl.mismatch.tokens"] > 300
        assert (found["train/kl.mismatch.own.max"] == 0) == exact
        assert found["train/kl.mismatch.own"] < 0.1
        assert not torch.equal(before, policy.head.weight)
    assert paths()["policy"] == "kernels"
    assert sampling or paths()["linear_logprob"] == "triton"


def test_a_checkpoint_goes_on_on_a_card(tmp_path):
    policy = narrow_policy()
    trainer = made_trainer(policy, scales_every=1)
    first = trainer.step([sampled_group(policy, 0)])
    assert any(name.startswith("quant/train/") for name in first)
    store = CheckpointStore(tmp_path)
    store.save(1, {"policy": dict(policy.state_dict()), "trainer": trainer.state_dict()})
    group = sampled_group(policy, 1)
    trainer.step([group])

    other = narrow_policy()
    again = made_trainer(other, scales_every=1)
    state = store.latest().load_state()
    other.load_state_dict(state["policy"])
    again.load_state_dict(state["trainer"])
    again.step([group])
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
