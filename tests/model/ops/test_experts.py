"""Kernels of the mixture of experts under Triton's interpreter at small shapes, against their definitions."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")

from model.ops.experts import reference as experts

BF16 = torch.bfloat16
KERNELS, PRODUCT = "model.ops.experts.triton", "model.ops.experts.product"


def _error(got, expected) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def _routed(forced=None, tokens=21, count=6):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 64).to(BF16), (torch.randn(count, 64) * 0.3).to(BF16)
    return (x, weight, torch.randn(count) * 0.1, 2, 1.5, 1.0, forced)


def _planned(tokens=21, count=6, shared=1):
    """Ids, weights and plan of tokens that leave experts 2 and 3 empty, if there are that many."""
    forced = torch.stack([torch.arange(tokens) % 2, 4 + torch.arange(tokens) % (count - 4)], 1)
    _, ids, weights, _ = experts.route(*_routed(forced, tokens, count))
    return weights, experts.plan(ids, count, shared)


def test_route_chooses_weighs_and_counts(interpreted):
    forced = torch.full((21, 2), -1)
    forced[3] = torch.tensor([5, 0])
    for arguments in (_routed(), _routed(forced)):
        affinity, ids, weights, loads = interpreted(KERNELS, "route", *arguments)
        expected = experts.route(*arguments)
        assert _error(affinity, expected[0]) < 1e-6
        dense = [torch.zeros(21, 6).scatter(1, i, w) for i, w in ((ids, weights), expected[1:3])]
        assert _error(*dense) < 1e-6
        assert torch.equal(loads, expected[3])
        assert loads.shape == (2, 6) and loads[1].sum() == 5 * 2


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_gradient_of_routing(interpreted, given):
    x, weight, bias, *options = _routed()
    x[4] *= 40.0
    wide = [y.float().requires_grad_() for y in (x, weight)]
    affinity, ids, weights, _ = experts.route(wide[0], wide[1], bias, *options)
    grads = [torch.randn_like(y) if g else None for y, g in zip((affinity, weights), given, strict=True)]
    loss = sum((y * g).sum() for y, g in zip((affinity, weights), grads, strict=True) if g is not None)
    wanted = torch.autograd.grad(loss, wide)
    module = "model.ops.experts.route_gradients"
    arguments = affinity.detach(), ids, *grads
    parts = interpreted(module, "logit_gradients", *arguments, factor=options[1], temperature=options[2])
    logits = parts.float().unflatten(1, (2, 6)).sum(1)
    assert _error(logits @ weight.float(), wanted[0]) < 1e-4
    assert _error(logits.t() @ x.float(), wanted[1]) < 1e-4


@pytest.mark.parametrize(("tokens", "count", "shared"), [(1, 6, 0), (21, 6, 1), (840, 6, 2), (40, 300, 1)])
@pytest.mark.parametrize("scanned", [False, True])
def test_plan_groups_tokens_in_order(interpreted, tokens, count, shared, scanned):
    _, ids, _, loads = experts.route(*_routed(None, tokens, count))
    got = interpreted(KERNELS, "plan", ids, loads, shared, **({"scan_above": 0} if scanned else {}))
    expected = experts.plan(ids, count, shared)
    for name in ("tokens", "place", "ends"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    real = expected.tiles[:, 0] >= 0
    assert torch.equal(got.tiles[:, 0], expected.tiles[:, 0])
    assert torch.equal(got.tiles[real], expected.tiles[real])


def test_activation_its_gradient_and_the_sum(interpreted):
    weights, plan = _planned()
    hidden = (torch.randn(63, 48) * 3).to(BF16)
    out = interpreted(KERNELS, "swiglu", hidden, weights, plan, 4.03)
    assert torch.equal(out, experts.swiglu(hidden, weights, plan, 4.03))
    wide, weigh = hidden.float().requires_grad_(), weights.clone().requires_grad_()
    product = experts.swiglu(wide, weigh, plan, 4.03)
    grad = torch.randn_like(product).to(BF16)
    product.backward(grad.float())
    grads = interpreted(KERNELS, "swiglu_backward", hidden, weights, plan, 4.03, grad)
    assert _error(grads[0], wide.grad) < 4e-3
    assert _error(grads[1], weigh.grad) < 1e-5
    rows = torch.randn(63, 64).to(BF16)
    assert torch.equal(interpreted(KERNELS, "combine", rows, plan), experts.combine(rows, plan))


def _matrices(groups, width=96, inner=80):
    w13, w2 = torch.randn(groups, 2 * inner, width) / 8, torch.randn(groups, width, inner) / 8
    return w13.to(BF16), w2.to(BF16)


@pytest.mark.parametrize("tokens", [1, 21, 300])
def test_products_of_tokens_and_of_rows(interpreted, tokens):
    weights, plan = _planned(tokens)
    (w13, w2), x = _matrices(7), torch.randn(tokens, 96).to(BF16)
    hidden = interpreted(PRODUCT, "grouped", x, w13, plan, of_tokens=True)
    assert _error(hidden, experts.grouped(x.double(), w13, plan, True)) < 4e-3
    assert torch.equal(hidden, interpreted(PRODUCT, "grouped", x[plan.tokens], w13, plan))
    active = interpreted(PRODUCT, "activated", x, w13, weights, plan, 0.5)
    assert torch.equal(active, experts.swiglu(hidden, weights, plan, 0.5))
    rows = interpreted(PRODUCT, "grouped", active, w2, plan)
    assert _error(rows, experts.grouped(active.double(), w2, plan, False)) < 4e-3


@pytest.mark.parametrize("tokens", [1, 21, 300])
def test_few_tokens_through_their_experts(interpreted, tokens):
    weights, plan = _planned(tokens)
    (w13, w2), x = _matrices(7, 128, 64), torch.randn(tokens, 128).to(BF16)
    got = interpreted(PRODUCT, "few", x, w13, w2, weights, plan, 0.5)
    active = experts.swiglu(experts.grouped(x, w13, plan, True), weights, plan, 0.5)
    assert _error(got, experts.grouped(active.double(), w2, plan, False)) < 4e-3


@pytest.mark.parametrize("of_tokens", [False, True])
def test_gradients_of_products(interpreted, of_tokens):
    _, plan = _planned(300)
    w13, _ = _matrices(7)
    x = torch.randn(300, 96).to(BF16)
    x = x if of_tokens else x[plan.tokens]
    wide, weight = x.double().requires_grad_(), w13.double().requires_grad_()
    out = experts.grouped(wide, weight, plan, of_tokens)
    grad = torch.randn_like(out).to(BF16)
    out.backward(grad.double())
    grad_x = interpreted(PRODUCT, "input_gradient", grad, w13, plan)
    if of_tokens:
        grad_x = experts.combine(grad_x, plan)
    assert _error(grad_x, wide.grad) < 4e-3
    grad_weight = interpreted(PRODUCT, "weight_gradient", grad, x[plan.tokens] if of_tokens else x, plan)
    assert _error(grad_weight, weight.grad) < 4e-3
    assert not grad_weight[2:4].any()
