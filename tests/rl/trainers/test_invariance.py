"""What a step learns depends neither on how its batch is cut, nor on how it is dealt out to processes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.algorithms import AlgorithmConfig
from rl.algorithms.aggregation import MODES
from rl.algorithms.losses import LOSSES
from rl.trainers import OptimizerConfig, RLConfig, RLTrainer, SFTConfig, SFTTrainer
from rl.trainers.forward import token_outputs
from rl.trainers.packing import deal, micro_batches, pack
from rl.trainers.ranks import Ranks

STILL = OptimizerConfig(learning_rate=0.0, warmup_steps=0)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    budget=st.integers(100, 300),
    ranks=st.integers(1, 5),
)
def test_every_sample_is_dealt_once_and_turns_are_alike(lengths, budget, ranks):
    dealt = deal(lengths, budget, ranks)
    every = sorted(i for own in dealt for group in own for i in group)
    assert every == list(range(len(lengths)))
    assert len({len(own) for own in dealt}) == 1
    assert all(sum(lengths[i] for i in group) <= budget for own in dealt for group in own)
    # One more micro-batch for each rank than one process would need, at most.
    assert len(dealt[0]) * ranks < len(pack(lengths, budget)) + ranks


@given(seed=st.integers(0, 99))
def test_ranks_that_wait_for_each_other_have_equally_much_to_do(seed):
    lengths = np.clip(np.random.default_rng(seed).lognormal(4, 1, 400), 8, 512).astype(int).tolist()
    dealt = deal(lengths, 2048, 4)
    loads = [[sum(lengths[i] for i in group) for group in own] for own in dealt]
    turns = [(max(turn), sum(turn) / 4) for turn in zip(*loads, strict=True)]
    assert sum(mean for _, mean in turns) / sum(longest for longest, _ in turns) > 0.95


class Counting(Ranks):
    """A rank whose sums are its own: what it adds to those of the others."""

    def total(self, values):
        return values

    def sum(self, value):
        return value

    def any(self, flag):
        return flag

    def gather(self, value):
        return [value]


def accumulated(trainer, step):
    """The gradients of a step, before they are clipped."""
    kept = {}

    def keep():
        for name, parameter in trainer.optimizer.parameters.items():
            if parameter.grad is not None:
                grad = parameter.grad
                kept[name] = grad.to_dense() if grad.is_sparse else grad.clone()
        return 0.0

    trainer.optimizer.clip = keep
    return step(), kept


@pytest.fixture
def groups(make_turn, make_trajectory, make_group):
    rng = np.random.default_rng(0)
    made = []
    for number in range(2):
        trajectories = []
        for index in range(3):
            completion = rng.integers(3, 60, size=int(rng.integers(1, 7))).tolist()
            turn = make_turn(
                [4, 10, 11, 20], completion, logprobs=(-4 - rng.random(len(completion))).tolist()
            )
            trajectories.append(make_trajectory([[turn]], float(index) / 2, group=number, index=index))
        made.append(make_group(trajectories, number))
    return made


@settings(max_examples=4)
@given(mode=st.sampled_from(MODES), ranks=st.integers(2, 7))
def test_the_parts_of_the_ranks_add_up_to_the_step_of_one(make_policy, groups, mode, ranks):
    """With more ranks than samples, too: the idle ones add nothing."""
    algorithm = AlgorithmConfig(aggregation=mode, max_length=8 if mode.endswith("norm") else None)

    def step(own):
        config = RLConfig(token_budget=24, optimizer=STILL, balance_coef=0.1, indexer_coef=0.1)
        trainer = RLTrainer(make_policy(), config, algorithm, ranks=own)
        return accumulated(trainer, lambda: trainer.step(groups))

    whole, expected = step(Ranks())
    parts = [step(Counting(rank, ranks)) for rank in range(ranks)]
    assert sum(part["train/loss"] for part, _ in parts) == pytest.approx(whole["train/loss"], abs=1e-5)
    for name, grad in expected.items():
        total = sum(found[name] for _, found in parts if name in found)
        assert (total - grad).abs().max() <= 1e-5 * max(grad.abs().max().item(), 1.0), name


def test_imitation_adds_up_too(make_policy, make_sample):
    samples = [make_sample(range(3, 3 + n), [0] + [1] * (n - 1), id=str(n)) for n in (9, 4, 20)]

    def step(own):
        config = SFTConfig(token_budget=24, optimizer=STILL, indexer_coef=0.1, indexer_over="dense")
        trainer = SFTTrainer(make_policy(), config, ranks=own)
        return accumulated(trainer, lambda: trainer.step(samples))

    whole, expected = step(Ranks())
    parts = [step(Counting(rank, 3)) for rank in range(3)]
    assert sum(p["sft/loss"] for p, _ in parts) == pytest.approx(whole["sft/loss"], abs=1e-5)
    assert sum(p["sft/indexer"] for p, _ in parts) == pytest.approx(whole["sft/indexer"], abs=1e-5)
    for name, grad in expected.items():
        total = sum(found[name] for _, found in parts)
        assert (total - grad).abs().max() <= 1e-5 * max(grad.abs().max().item(), 1.0), name


def test_recomputing_activations_changes_nothing(make_policy, make_sample):
    samples = [make_sample(range(3, 3 + n), [0] + [1] * (n - 1), id=str(n)) for n in (9, 40)]
    results = []
    for recompute in (False, True):
        config = SFTConfig(optimizer=STILL, indexer_coef=0.1, fake_quant=True, recompute=recompute)
        trainer = SFTTrainer(make_policy(), config)
        results.append(accumulated(trainer, lambda trainer=trainer: trainer.step(samples)))
    (plain, expected), (again, found) = results
    assert plain == again
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("loss", LOSSES.names())
def test_an_observation_has_exactly_no_gradient_in_any_loss(make_policy, make_sample, loss):
    """Through the whole trainer path: the logits of a token that others wrote are never computed."""
    policy = make_policy()
    (batch,) = micro_batches(
        [make_sample([4, 5, 6, 7, 8, 9], [0, 1, 0, 0, 1, 1], logprobs=[0.0, -4, 0, 0, -4, -4])],
        64,
        torch.device("cpu"),
    )
    outputs = token_outputs(policy, batch)
    (gradient,) = torch.autograd.grad(_total(loss, batch, outputs), outputs.hidden)
    read = (batch.loss_mask.nonzero()[:, 0] - 1).tolist()
    others = [i for i in range(6) if i not in read]
    assert gradient[read].abs().sum() > 0 and not gradient[others].any()


def _total(loss, batch, outputs):
    from rl.algorithms import LossInputs, objective

    inputs = LossInputs(
        logprobs=outputs.logprobs,
        sampler_logprobs=batch.logprobs,
        old_logprobs=outputs.logprobs.detach(),
        advantages=batch.advantages,
        mask=batch.loss_mask,
        versions=batch.versions,
        segment_ids=batch.segment_ids,
        segments=1,
        current_version=0,
        entropy=outputs.entropy,
    )
    return objective(AlgorithmConfig(loss=loss, corrections=()), inputs, torch.ones(1)).loss
