"""Losses against published values, and what holds for all of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms import AlgorithmConfig, AlgorithmError, LossInputs, LossOutputs, objective
from rl.algorithms.losses import LOSSES, cispo, dppo_tv, dual_clip, gmpo, gspo, ppo_clip, reinforce, sapo


def logs(*ratios):
    return [math.log(r) for r in ratios]


def test_ppo_clip(make_inputs):
    inputs = make_inputs(logs(0.5, 1, 1.5), old_logprobs=[0, 0, 0], advantages=[1, -1, 2])
    loss = ppo_clip(inputs, clip_low=0.2, clip_high=0.2).loss
    torch.testing.assert_close(loss, torch.tensor([-0.5, 1, -2.4]))
    assert loss.mean().item() == pytest.approx(-0.6333, abs=1e-4)


def test_dual_clip(make_inputs):
    inputs = make_inputs(logs(0.5, 1, 10), old_logprobs=[0, 0, 0], advantages=[1, -1, -4])
    loss = dual_clip(inputs, clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss
    torch.testing.assert_close(loss, torch.tensor([-0.5, 1, 12]))
    assert loss.mean().item() == pytest.approx(4.1667, abs=1e-4)


def test_clip_metrics_count_only_what_the_clip_silences(make_inputs):
    inputs = make_inputs(logs(0.5, 0.5, 2, 2), old_logprobs=[0] * 4, advantages=[1, -1, 1, -1])
    metrics = ppo_clip(inputs).metrics
    assert metrics["clip.low"].tolist() == [0, 1, 0, 0] and metrics["clip.high"].tolist() == [0, 0, 1, 0]


def test_gspo_gives_every_token_the_sequence_ratio(make_inputs):
    logprobs = torch.tensor([0.2, -0.1, 0.5], requires_grad=True)
    inputs = make_inputs(logprobs, old_logprobs=[0, 0, 0], advantages=[2, 2, -1], segment_ids=[0, 0, 1])
    loss = gspo(inputs, clip_low=10.0, clip_high=10.0).loss
    expected = torch.tensor([-2 * math.exp(0.05), -2 * math.exp(0.05), math.exp(0.5)])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], expected)


def test_gspo_clips_the_sequence(make_inputs):
    inputs = make_inputs([0.2, -0.1], old_logprobs=[0, 0], advantages=[1, 1])
    torch.testing.assert_close(gspo(inputs).loss, torch.full((2,), -1.0004))


def test_gmpo_is_the_clipped_geometric_mean(make_inputs):
    inputs = make_inputs([1.0, -1.0, 0.2], old_logprobs=[0, 0, 0], advantages=[1, 1, 1])
    torch.testing.assert_close(gmpo(inputs).loss, torch.full((3,), -math.exp((0.4 - 1 + 0.2) / 3)))
    inputs = make_inputs([1.0, -1.0, 0.2], old_logprobs=[0, 0, 0], advantages=[-1, -1, -1])
    torch.testing.assert_close(gmpo(inputs).loss, torch.full((3,), math.exp((1 - 0.4 + 0.2) / 3)))


def test_cispo_keeps_the_gradient_of_clipped_tokens(make_inputs):
    logprobs = torch.tensor([2.0, -1.0], requires_grad=True)
    loss = cispo(make_inputs(logprobs, old_logprobs=[0, 0], advantages=[1, -2])).loss
    torch.testing.assert_close(loss, torch.tensor([-5 * 2.0, math.exp(-1) * 2 * -1.0]))
    grad = torch.autograd.grad(loss.sum(), logprobs)[0]
    torch.testing.assert_close(grad, torch.tensor([-5.0, 2 * math.exp(-1)]))


def test_sapo_is_the_policy_gradient_at_ratio_one(make_inputs):
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss = sapo(make_inputs(logprobs, advantages=[3, -2])).loss
    torch.testing.assert_close(loss, torch.tensor([-4 * 0.5 * 3, 4 / 1.05 * 0.5 * 2]))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], torch.tensor([-3.0, 2.0]))


def test_dppo_masks_by_the_shift_in_probability(make_inputs):
    sampler = logs(0.5, 0.5, 0.5, 0.5, 0.5)
    inputs = make_inputs(
        logs(0.8, 0.6, 0.2, 0.2, 0.2),
        sampler_logprobs=sampler,
        advantages=[1, 1, -1, 1, 0],
        old_logprobs=[0] * 5,
    )
    expected = [
        -keep * a * r + 1e-3 * math.log(r) ** 2
        for keep, a, r in [(0, 1, 1.6), (1, 1, 1.2), (0, -1, 0.4), (1, 1, 0.4), (0, 0, 0.4)]
    ]
    outputs = dppo_tv(inputs)
    torch.testing.assert_close(outputs.loss, torch.tensor(expected))
    assert outputs.metrics["clip.low"].tolist() == [0, 0, 1, 0, 1]


def test_reinforce(make_inputs):
    torch.testing.assert_close(
        reinforce(make_inputs([-2.0, -1], advantages=[1, -3])).loss, torch.tensor([2.0, -3])
    )


@pytest.mark.parametrize("name", LOSSES.names())
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_no_ratio_overflows(make_inputs, name, advantage, gap):
    logprobs = torch.tensor([gap, -0.5], requires_grad=True)
    inputs = make_inputs(
        logprobs, old_logprobs=[0, -0.5], sampler_logprobs=[0, -0.5], advantages=[advantage] * 2
    )
    loss = LOSSES.load(name)(inputs).loss
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), logprobs)[0].isfinite().all()


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_batch_without_trained_tokens_has_loss_zero(make_inputs, name):
    logprobs = torch.zeros(3, requires_grad=True)
    inputs = make_inputs(logprobs, mask=[False] * 3)
    loss = objective(AlgorithmConfig(loss=name, corrections=()), inputs, torch.ones(1)).loss
    assert loss.item() == 0 and not torch.autograd.grad(loss, logprobs)[0].any()


CORRECTED = [
    ("opsm",),
    ("token_tis", "geometric_mask"),
    ("sequence_tis",),
    ("icepop",),
    ("decoupled_ppo", "opsm"),
]
CONFIGS = [AlgorithmConfig(loss=name) for name in LOSSES.names()]
CONFIGS += [AlgorithmConfig(corrections=c) for c in CORRECTED]
CONFIGS += [AlgorithmConfig(corrections=("staleness_mask",), max_staleness=1)]
CONFIGS += [AlgorithmConfig(kl=k, kl_coef=0.1, entropy_coef=0.01) for k in ("k1", "k2", "k3", "unbiased")]
CONFIGS += [AlgorithmConfig(kl="k3", kl_coef=0.1, kl_in="reward")]


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.loss}-{'-'.join(c.corrections)}-{c.kl}-{c.kl_in}"
)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 30))
def test_masked_tokens_have_zero_gradient_and_no_influence(config, seed, count):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, generator=generator) < 0.5
    columns = {
        name: torch.randn(count, generator=generator)
        for name in (
            "logprobs",
            "sampler_logprobs",
            "old_logprobs",
            "advantages",
            "reference_logprobs",
            "entropy",
        )
    }
    shared = {
        "mask": mask,
        "versions": torch.randint(0, 4, (count,), generator=generator),
        "segment_ids": torch.randint(0, 3, (count,), generator=generator),
        "segments": 3,
        "current_version": 3,
    }

    def run(fill):
        leaves = {
            name: torch.where(mask, x, torch.full_like(x, fill)).requires_grad_()
            for name, x in columns.items()
        }
        if fill != fill:  # what is differentiated is computed, hence finite
            leaves["logprobs"] = torch.where(mask, columns["logprobs"], torch.zeros(count)).requires_grad_()
        loss = objective(config, LossInputs(**leaves, **shared), torch.tensor([0.5, 0.2, 0.7])).loss
        return loss, torch.autograd.grad(loss, leaves["logprobs"])[0]

    loss, grad = run(0.0)
    other_loss, other_grad = run(float("nan"))
    assert not grad[~mask].any() and loss.isfinite() and grad.isfinite().all()
    torch.testing.assert_close(other_loss, loss, rtol=0, atol=0)
    torch.testing.assert_close(other_grad, grad, rtol=0, atol=0)


def test_shapes_that_would_broadcast_are_refused(make_inputs):
    with pytest.raises(ValueError, match="advantages has shape"):
        make_inputs([0.0, 0.0, 0.0], advantages=[1.0])
    with pytest.raises(ValueError, match="one row of tokens"):
        make_inputs(torch.zeros(2, 2), segment_ids=[0, 0])


def mean_loss(inputs):
    return LossOutputs(inputs.logprobs.mean())


def bare_loss(inputs):
    return inputs.logprobs


def mean_metric(inputs):
    return LossOutputs(inputs.logprobs, {"mine": inputs.logprobs.mean()})


def one_weight(inputs):
    return 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": f"{__name__}:mean_loss"}, r"mean_loss' returned \(\) for 3 tokens"),
        ({"loss": f"{__name__}:bare_loss"}, r"bare_loss' returned a Tensor; it returns LossOutputs"),
        ({"loss": f"{__name__}:mean_metric"}, r"metric 'mine' of loss .* returned \(\)"),
        ({"corrections": (f"{__name__}:one_weight",)}, "one_weight' returned float for 3 tokens"),
    ],
)
def test_what_a_users_own_function_returns_is_not_broadcast(make_inputs, settings, message):
    inputs = make_inputs([-1.0, -1.0, -2.0])
    with pytest.raises(AlgorithmError, match=message):
        objective(AlgorithmConfig(**settings), inputs, torch.ones(1))
