from dataclasses import replace

import pytest
import torch

from model.config import PolicyConfig
from model.policy import Policy
from rl.trainers.muon import Muon, newton_schulz
from rl.trainers.optim import Optimizer, OptimizerConfig, OptimizerError, is_matrix
from rl.trainers.sinkhorn import BalancedMomentum, balance


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 32, 8), (4, 8, 32)])
def test_newton_schulz_brings_singular_values_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(newton_schulz(matrices, steps=8))
    assert values.min() > 0.5 and values.max() < 1.3
    assert not newton_schulz(torch.zeros(shape)).any()


def test_stacked_matrices_are_orthogonalised_one_by_one():
    gradient = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(1))
    together, apart = torch.zeros(3, 16, 8), [torch.zeros(1, 16, 8) for _ in range(3)]
    Muon({"w": together}).step({"w": gradient}, 1.0)
    for i, matrix in enumerate(apart):
        Muon({"w": matrix}).step({"w": gradient[i : i + 1]}, 1.0)
    torch.testing.assert_close(together, torch.cat(apart))


@pytest.mark.parametrize("shape", [(1, 64, 64), (1, 24, 96)])
def test_an_update_has_the_stated_root_mean_square(shape):
    matrix = torch.zeros(shape)
    Muon({"w": matrix}).step({"w": torch.randn(shape, generator=torch.Generator().manual_seed(2))}, 1.0)
    assert matrix.square().mean().sqrt().item() == pytest.approx(0.18, rel=0.25)


def test_matrices_go_to_muon_and_all_else_to_adamw(make_policy):
    policy = make_policy()
    muon = {name for name, p in policy.named_parameters() if is_matrix(name, p)}
    assert {"layers.0.attn.wq_a.weight", "layers.0.ffn.w13", "layers.1.engram.wkv.weight"} <= muon
    for part in ("embed.weight", "head.weight", "gate.weight", "hc_attn.fn", "engram.embed", "norm", "sink"):
        assert not any(part in name and "wgate" not in name for name in muon), part


@pytest.mark.parametrize("head_wise", [False, True])
def test_every_parameter_with_a_gradient_moves(make_policy, head_wise):
    policy = make_policy()
    optimizer = Optimizer(
        policy,
        OptimizerConfig(learning_rate=1e-3, muon_learning_rate=1e-2, head_wise=head_wise, frozen=("^embed",)),
    )
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for p in policy.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step(1.0)
    still = [name for name, p in policy.named_parameters() if torch.equal(p, before[name])]
    assert still == ["embed.weight"]


def test_schedule():
    cosine = OptimizerConfig(learning_rate=1, warmup_steps=10, decay="cosine")
    assert cosine.fraction(0, 100) == pytest.approx(0.1, rel=1e-3)
    assert cosine.fraction(50, 100) == pytest.approx(0.55) and cosine.fraction(100, 100) == pytest.approx(0.1)
    constant = OptimizerConfig(learning_rate=1, warmup_steps=0)
    assert constant.fraction(0, 100) == constant.fraction(99, 100) == 1
    held = OptimizerConfig(
        learning_rate=1, warmup_steps=0, decay="linear", decay_from=0.6, decay_to=0.8, final_fraction=0.2
    )
    assert [held.fraction(step, 100) for step in (0, 60, 70, 80, 99)] == pytest.approx([1, 1, 0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": "square"}, "'constant', 'cosine' or 'linear'"),
        ({"weight_decay": -1}, "weight_decay=-1: set it to 0 or more"),
        ({"max_grad_norm": 0}, "must be positive"),
        ({"decay": "cosine", "decay_from": 0.9, "decay_to": 0.5}, "the first is below the second"),
        ({"decay_from": 0.5}, "no effect with decay=constant"),
        ({"final_fraction": 0.5}, "final_fraction has no effect with decay=constant"),
        ({"betas": (1.0, 0.98)}, r"betas=\[1.0, 0.98\]: both are from 0 to below 1"),
        ({"betas": (0.9, float("nan"))}, "both are from 0 to below 1"),
        ({"epsilon": 0.0}, "epsilon is 0.0; it must be positive"),
        ({"frozen": ("layers[",)}, "'layers.' is no pattern"),
        ({"muon_polish": 2}, "belongs to Muon, which is off"),
        ({"table_factor": 2.0}, "belongs to balanced momentum, which is off"),
    ],
)
def test_settings_without_sense_are_refused(settings, message):
    with pytest.raises(OptimizerError, match=message):
        OptimizerConfig(learning_rate=1.0, **settings)


def test_a_frozen_pattern_that_matches_nothing_is_refused(make_policy):
    with pytest.raises(OptimizerError, match="matches no parameter"):
        Optimizer(make_policy(), OptimizerConfig(learning_rate=1, frozen=("vison",)))


def test_a_gradient_that_is_not_finite_names_its_parameter(make_policy):
    policy = make_policy()
    optimizer = Optimizer(policy, OptimizerConfig(learning_rate=1e-3))
    policy.norm.weight.grad = torch.full_like(policy.norm.weight, float("nan"))
    with pytest.raises(OptimizerError, match=r"in norm\.weight; the weights were not touched"):
        optimizer.clip()


def test_a_state_of_another_configuration_is_refused(make_policy):
    policy = make_policy()
    muon = Optimizer(policy, OptimizerConfig(learning_rate=1, muon_learning_rate=1))
    adamw = Optimizer(policy, OptimizerConfig(learning_rate=1))
    with pytest.raises(OptimizerError, match="muon state does not fit"):
        muon.load_state_dict(adamw.state_dict())


def test_the_published_steps_bring_singular_values_nearer_to_one():
    matrices = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(newton_schulz(matrices, steps=8, polish=2))
    assert (values - 1).abs().max() < 0.02


def test_balanced_updates_are_of_one_size_and_silent_rows_stay():
    gradient = (
        torch.randn(12, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 12)[:, None]
    )
    gradient[5] = 0.0
    update = balance(gradient)
    rows, columns = update.square().mean(1).sqrt(), update.square().mean(0).sqrt()
    assert not update[5].any()
    assert rows[torch.arange(12) != 5].allclose(torch.ones(11), atol=1e-4)
    assert columns.max() / columns.min() < 1.05
    table = torch.zeros(12, 8)
    optimizer = BalancedMomentum({"t": table}, factors={"t": 5.0})
    optimizer.step({"t": gradient.to_sparse(1)}, 0.1)
    torch.testing.assert_close(table, -0.18 * 0.1 * 5 * balance(gradient))


def narrow_policy():
    return Policy(replace(PolicyConfig.preset("pico"), dtype="bfloat16"))


def small_gradients(policy):
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_narrow_weights_gather_steps_too_small_for_them_and_resume_with_the_same_bits():
    config = OptimizerConfig(learning_rate=2e-5, muon_learning_rate=2e-5, balanced_learning_rate=2e-5)
    policies = [narrow_policy(), narrow_policy()]
    first, second = (Optimizer(policy, config) for policy in policies)
    start = policies[0].layers[0].attn.wq_a.weight.detach().clone()
    small_gradients(policies[0])
    first.step(1.0)
    one = (policies[0].layers[0].attn.wq_a.weight != start).float().mean()
    for _ in range(60):
        small_gradients(policies[0])
        first.step(1.0)
    many = (policies[0].layers[0].attn.wq_a.weight != start).float().mean()
    assert one < 0.05 and many > 0.2
    policies[1].load_state_dict(policies[0].state_dict())
    state = first.state_dict()
    assert state["masters"]["embed.weight"].dtype is torch.float32
    second.load_state_dict(state)
    for policy, optimizer in zip(policies, (first, second), strict=True):
        small_gradients(policy)
        optimizer.step(1.0)
    for name, tensor in policies[0].state_dict().items():
        assert torch.equal(tensor, policies[1].state_dict()[name]), name
