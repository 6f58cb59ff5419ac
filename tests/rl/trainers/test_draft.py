"""The drafter learns beside the policy, which does not notice."""

import numpy as np
import pytest
import torch

from model.config import PolicyConfig
from model.policy import Policy
from rl.algorithms import AlgorithmConfig
from rl.trainers import OptimizerConfig, RLConfig, RLTrainer, SFTConfig, SFTTrainer, trajectory_samples
from rl.trainers.base import TrainerStateError
from rl.trainers.draft import DraftConfig, DraftTrainer
from rl.watch.metrics import split_families

RATES = OptimizerConfig(learning_rate=1e-3, warmup_steps=0)
ON = DraftConfig(anchors=64, optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0))


@pytest.fixture
def policy():
    made = Policy(PolicyConfig.preset("nano_draft"))
    made.reset_parameters(1)
    return made


@pytest.fixture
def samples(make_sample):
    """Counting upwards, which is easy to say ahead."""
    made = []
    for start in range(8):
        ids = [4] + [10 + (start + i) % 10 for i in range(24)]
        made.append(make_sample(ids, [0, 0] + [1] * 23))
    return made


def parts(policy):
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    drafter = {name for name in state if name.startswith("mtp.")}
    return {n: t for n, t in state.items() if n not in drafter}, {n: state[n] for n in drafter}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_alone_it_changes_the_drafter_only_and_learns(policy, samples):
    SFTTrainer(policy, SFTConfig(optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=0))).step(samples)
    trainer = DraftTrainer(policy, ON, total_steps=30)
    backbone, drafter = parts(policy)
    first = trainer.step(samples)
    for _ in range(14):
        last = trainer.step(samples)
    assert same(backbone, parts(policy)[0]) and not same(drafter, parts(policy)[1])
    assert last["draft/loss"] < 0.8 * first["draft/loss"]
    assert last["draft/accepted"] > first["draft/accepted"]
    assert trainer.steps == 15


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_beside_the_policy_it_changes_nothing_of_it(
    policy, samples, kind, make_group, make_trajectory, make_turn
):
    """The policy's weights after a step are the same bits with and without a drafter in training."""

    def step(draft):
        made = Policy(policy.config)
        made.load_state_dict(policy.state_dict())
        if kind == "sft":
            trainer = SFTTrainer(made, SFTConfig(optimizer=RATES, draft=draft))
            return made, trainer.step(samples)
        trainer = RLTrainer(made, RLConfig(optimizer=RATES, draft=draft), AlgorithmConfig(group_size=2))
        answers = [[30, 31, 32, 33, 2], [31, 30, 33, 32, 2]]
        trajectories = []
        for index, answer in enumerate(answers):
            bare = make_trajectory([[make_turn([4, 10, 11], answer)]])
            logprobs = trainer.logprobs(trajectory_samples(bare, 1.0))[0][3:].tolist()
            turns = [make_turn([4, 10, 11], answer, logprobs=logprobs)]
            trajectories.append(make_trajectory([turns], float(index), index=index))
        return made, trainer.step([make_group(trajectories)])

    without, plain = step(DraftConfig())
    beside, metrics = step(ON)
    assert same(parts(without)[0], parts(beside)[0])
    assert not same(parts(policy)[0], parts(beside)[0])
    assert same(parts(policy)[1], parts(without)[1]) and not same(parts(policy)[1], parts(beside)[1])
    assert not any("draft" in name for name in plain)
    assert {name: metrics[name] for name in plain} == plain
    name = "sft/draft.accepted" if kind == "sft" else "draft/accepted"
    drafted = split_families(metrics)[name.split("/")[0]]
    assert name in drafted and np.isfinite(list(drafted.values())).all()


def test_gradients_do_not_depend_on_micro_batches(policy, samples):
    """With every anchor taken, and as many in each micro-batch."""

    def gradients(budget):
        everything = DraftConfig(anchors=10_000, optimizer=OptimizerConfig(learning_rate=0.0))
        trainer = DraftTrainer(policy, everything, total_steps=1, token_budget=budget)
        trainer.optimizer.step = lambda fraction: None
        trainer.step(samples)
        kept = {n: p.grad.clone() for n, p in trainer.optimizer.parameters.items()}
        trainer.discard()
        return kept

    whole, cut = gradients(8192), gradients(50)
    for name, grad in whole.items():
        torch.testing.assert_close(cut[name], grad, rtol=1e-3, atol=1e-6)


def test_it_resumes_to_the_same_bits(policy, samples):
    config = SFTConfig(optimizer=RATES, draft=DraftConfig(anchors=20, optimizer=RATES))
    trainer = SFTTrainer(policy, config)
    trainer.step(samples)
    weights, state = {n: t.clone() for n, t in policy.state_dict().items()}, trainer.state_dict()
    expected = trainer.step(samples)
    other = Policy(policy.config)
    other.load_state_dict(weights)
    resumed = SFTTrainer(other, config)
    resumed.load_state_dict(state)
    assert resumed.step(samples) == expected
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True))


def test_a_checkpoint_with_a_drafter_in_training_needs_one(policy, samples):
    state = SFTTrainer(policy, SFTConfig(draft=ON)).state_dict()
    with pytest.raises(TrainerStateError, match="anchors"):
        SFTTrainer(policy, SFTConfig()).load_state_dict(state)


def test_nothing_to_draft_is_no_step(policy, make_sample):
    """A single trained token has no anchor before it."""
    trainer = DraftTrainer(policy, ON, total_steps=1)
    assert trainer.step([make_sample([4, 10, 11], [0, 0, 1])]) == {}
    assert trainer.steps == 0


def test_a_policy_without_a_drafter_is_refused(make_policy):
    with pytest.raises(ValueError, match="nano_draft"):
        SFTTrainer(make_policy(), SFTConfig(draft=ON))
