import pytest
import torch

from rl.trainers.muon import Muon, newton_schulz
from rl.trainers.optim import Optimizer, OptimizerConfig, OptimizerError, is_matrix


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": "square"}, "'constant', 'cosine' or 'linear'"),
        ({"weight_decay": -1}, "weight_decay=-1: set it to 0 or more"),
        ({"max_grad_norm": 0}, "must be positive"),
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
