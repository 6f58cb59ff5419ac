"""The versions of single tokens reach the loss: masks by token and by sequence."""

from dataclasses import replace

import pytest
import torch

from rl.algorithms import AlgorithmConfig
from rl.trainers import RLConfig, RLTrainer, trajectory_samples

PROMPT, GOOD, BAD = [5, 9, 2], [30, 31, 32, 2], [33, 31, 34, 2]


def gradients(policy, group, algorithm: AlgorithmConfig, version: int):
    """The metrics of a step over `group`, and the gradients that it would have applied."""
    trainer = RLTrainer(policy, RLConfig(token_budget=256, fake_quant=False), algorithm)
    trainer.version = trainer.steps = version
    kept = {}
    trainer.optimizer.step = lambda fraction: kept.update(
        {n: p.grad.to_dense().clone() for n, p in trainer.optimizer.parameters.items() if p.grad is not None}
    )
    return trainer.step([group]), kept


@pytest.fixture
def crossing(make_policy, make_turn, make_trajectory, make_group):
    """A group of two samples whose first two tokens are of version 0 and whose others are of version 3."""
    trainer = RLTrainer(make_policy(), RLConfig(fake_quant=False), AlgorithmConfig())

    def member(ids, reward, index):
        bare = make_trajectory([[make_turn(PROMPT, ids)]])
        logprobs = trainer.logprobs(trajectory_samples(bare, 1.0))[0][len(PROMPT) :].tolist()
        turn = replace(make_turn(PROMPT, ids, logprobs=logprobs), policy_versions=(0, 0, 3, 3))
        return make_trajectory([[turn]], reward, index=index)

    return make_group([member(GOOD, 1.0, 0), member(BAD, 0.0, 1)])


def test_tokens_that_are_too_old_carry_no_loss_and_stay_in_the_denominator(make_policy, crossing) -> None:
    plain, whole = gradients(make_policy(), crossing, AlgorithmConfig(corrections=()), 3)
    fresh = AlgorithmConfig(corrections=("staleness_mask",), max_staleness=2)
    masked, some = gradients(make_policy(), crossing, fresh, 3)
    assert (plain["train/mask.off_policy"], masked["train/mask.off_policy"]) == (0.0, 0.5)
    assert masked["train/tokens.trained"] == plain["train/tokens.trained"] == 8
    kept = AlgorithmConfig(corrections=("staleness_mask",), max_staleness=3)
    equal, all_ = gradients(make_policy(), crossing, kept, 3)
    assert equal["train/mask.off_policy"] == 0.0
    assert all(torch.equal(all_[name], whole[name]) for name in whole)
    assert not torch.equal(some["head.weight"], whole["head.weight"])


def test_an_old_failure_is_dropped_as_a_sequence_and_an_old_success_never_is(make_policy, crossing) -> None:
    def drifted(trajectory):
        (turn,) = trajectory.turns
        raised = tuple(logprob + 2.0 for logprob in turn.logprobs)  # far likelier under the sampler
        return replace(trajectory, branches=((replace(turn, logprobs=raised),),))

    old = replace(crossing, trajectories=tuple(map(drifted, crossing.trajectories)))
    strict = AlgorithmConfig(corrections=("opsm",), opsm_delta=1.0)
    assert gradients(make_policy(), old, strict, 3)[0]["train/mask.off_policy"] == 0.5
    assert gradients(make_policy(), crossing, strict, 3)[0]["train/mask.off_policy"] == 0.0
    loose = AlgorithmConfig(corrections=("opsm",), opsm_delta=3.0)
    assert gradients(make_policy(), old, loose, 3)[0]["train/mask.off_policy"] == 0.0
