import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.balance import balance_loss, expert_load
from model.config import PolicyConfig
from model.layers.attend import attend
from model.layers.hyper_connections import collapse, mix, sinkhorn, sum_patterns
from model.layers.moe import MixtureOfExperts, Routing
from model.layers.norm import inverse_rms, rms_norm
from model.layers.rope import Rotation, rotate
from model.layers.swiglu import clipped_swiglu
from model.layers.top_k import top_k_lowest_index
from model.policy import PackedTokens


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def check(function, *inputs):
    assert torch.autograd.gradcheck(function, inputs)
    with torch.no_grad():
        plain = function(*inputs)
    assert torch.allclose(function(*inputs), plain)


def test_written_out_gradients():
    check(lambda x, w: rms_norm(x, w, 1e-6), doubles(3, 2, 8), doubles(8))
    check(lambda x: inverse_rms(x, 1e-6), doubles(3, 8))
    patterns = tuple(pattern.double() for pattern in sum_patterns(3))
    check(lambda x: sinkhorn(x, 3, torch.tensor(1e-6, dtype=torch.float64), patterns), doubles(3, 3, 4))
    check(collapse, doubles(5, 4), doubles(5, 4, 6))
    check(mix, doubles(4, 4, 5), doubles(5, 4, 6), doubles(5, 4), doubles(5, 6))
    check(lambda g, u, w: clipped_swiglu(g, u, w, 0.7), doubles(4, 6), doubles(4, 6), doubles(4, 1))
    rotation = Rotation.at(torch.arange(5), torch.tensor([1.0, 0.1], dtype=torch.float64))
    check(lambda x: rotate(x, rotation), doubles(5, 8))


def test_attention_gradient_with_blocked_keys_and_a_row_without_any():
    bias = torch.zeros(2, 3, 5, dtype=torch.float64)
    bias[:, 1, 2:] = -torch.inf
    bias[0, 2] = -torch.inf
    check(lambda q, k, s: attend(q, k, bias, s), doubles(2, 3, 2, 4), doubles(2, 5, 4), doubles(2))
    assert not attend(doubles(2, 3, 2, 4), doubles(2, 5, 4), bias, doubles(2))[0, 2].any()


def test_doubly_stochastic():
    eps = torch.tensor(1e-6)
    matrix = sinkhorn(torch.randn(4, 4, 50), 20, eps, sum_patterns(4))
    assert (matrix.sum(0) - 1).abs().max() < 1e-4 and (matrix.sum(1) - 1).abs().max() < 1e-3


@given(st.data())
def test_top_k_prefers_the_lower_index_at_any_width(data):
    values = data.draw(
        st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0, -float("inf")]), min_size=1, max_size=40)
    )
    k = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    for scores in (torch.tensor(values), torch.tensor([*values, *[-float("inf")] * 30])):
        assert sorted(top_k_lowest_index(scores, k).tolist()) == sorted(expected)


def experts(chosen=2, count=7, shared=2):
    from dataclasses import replace

    config = replace(PolicyConfig.preset("nano"), n_shared_experts=shared)
    moe = MixtureOfExperts(config, count, chosen, torch.float32)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return moe


def test_visiting_only_chosen_experts_equals_computing_all():
    moe, x = experts().double(), doubles(11, 64)
    x_again = x.detach().clone().requires_grad_()
    routing = moe.gate(x, None)
    dense, sparse = moe._dense(x, routing), moe._sparse(x_again, moe.gate(x_again, None))
    assert torch.allclose(dense, sparse, rtol=1e-10, atol=1e-10)
    (dense**2).sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in moe.named_parameters()}
    moe.zero_grad()
    (sparse**2).sum().backward()
    assert torch.allclose(x.grad, x_again.grad, rtol=1e-10, atol=1e-10)
    for name, parameter in moe.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], rtol=1e-10, atol=1e-10), name


def test_router_bias_changes_the_choice_but_not_the_weights():
    gate, x = experts(shared=1).gate, torch.randn(50, 64)
    before = gate(x, None)
    gate.bias[3] = 100.0
    after = gate(x, None)
    assert (after.expert_ids == 3).any(-1).all()
    assert torch.equal(before.affinity, after.affinity)
    assert torch.allclose(after.weights.sum(-1), torch.full((50,), 1.5))
    gate.bias_vl[5] = 100.0
    image = torch.arange(50) < 20
    mixed = gate(x, image)
    assert (mixed.expert_ids[:20] == 5).any(-1).all()
    assert torch.equal(mixed.expert_ids[20:].sort(-1).values, after.expert_ids[20:].sort(-1).values)


def test_router_survives_extreme_logits():
    gate = experts().gate
    x = (gate.weight.detach().sum(0, keepdim=True) * -1e4).requires_grad_()
    gate(x, None).weights.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_balance_moves_bias_towards_idle_experts(nano):
    load = torch.tensor([[4.0, 0.0, 2.0, 2.0]]).repeat(6, 1)
    nano.update_balance(load, image_load=load.flip(1))
    assert torch.allclose(nano.blocks[2].ffn.gate.bias, torch.tensor([-0.001, 0.001, 0.0, 0.0]))
    assert torch.allclose(nano.blocks[2].ffn.gate.bias_vl, torch.tensor([0.0, 0.0, 0.001, -0.001]))


def test_expert_load_counts_choices(nano):
    output = nano(PackedTokens(torch.randint(0, 64, (37,)), torch.tensor([0, 30, 37])))
    assert output.aux.expert_load.shape == (6, 4)
    assert output.aux.expert_load.sum(1).tolist() == [74.0] * 6


def test_balance_loss_is_one_a_layer_when_even_and_larger_when_not():
    even = Routing(torch.ones(4, 4), torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]]), torch.ones(4, 2))
    assert torch.allclose(balance_loss([even, even], torch.tensor([0, 2, 4])), torch.tensor(2.0))
    skewed = Routing(
        torch.tensor([[9.0, 9.0, 1.0, 1.0]]).repeat(4, 1), torch.tensor([[0, 1]]).repeat(4, 1), even.weights
    )
    assert balance_loss([skewed], torch.tensor([0, 4])) == pytest.approx(4 * 0.5 * 0.45 * 2)
    assert expert_load([skewed], 4).tolist() == [[4.0, 4.0, 0.0, 0.0]]
