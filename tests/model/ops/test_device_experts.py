"""The mixture of experts on a card: against fp64, at odd loads, on poisoned memory, and repeated."""

import pytest
import torch

from benchmarks import kernel_data as data
from benchmarks.kernel_timing import error
from benchmarks.kernels_experts import choices
from model.ops.dispatch import paths
from model.ops.experts import activated, combine, few_rows, grouped, plan_of, reference, route, swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

LIMIT = 8.0


def _loads(kind: str, tokens: int, experts: int, chosen: int) -> torch.Tensor:
    """Choices [T, k]: popular experts, one that gets nothing, or all tokens to the same."""
    ids = choices(tokens, experts - 1, chosen, 1.0)
    if kind == "same":
        ids = torch.arange(chosen, device="cuda").expand(tokens, chosen).contiguous()
    return torch.where(ids == 3, experts - 1, ids) if kind == "hole" else ids


@pytest.mark.parametrize(("width", "inner"), [(320, 160), (2048, 512)])
@pytest.mark.parametrize(("kind", "tokens"), [("hole", 1), ("hole", 77), ("same", 300), ("hole", 1025)])
def test_tokens_through_experts_and_every_gradient(width, inner, kind, tokens):
    experts, chosen = 9, 3
    ids = _loads(kind, tokens, experts, chosen)
    plan = plan_of(ids, experts, 1)
    x = data.normal(tokens, width)
    w13 = data.normal(experts + 1, 2 * inner, width, scale=width**-0.5)
    w2 = data.normal(experts + 1, width, inner, scale=inner**-0.5)
    weights, grad = torch.rand(tokens, chosen, device="cuda"), data.normal(tokens, width)
    leaves = [t.requires_grad_() for t in (x, w13, w2, weights)]

    def run():
        active = activated(x, w13, weights, plan, limit=LIMIT)
        out = combine(grouped(active, w2, plan), plan)
        return out.detach(), torch.autograd.grad(out, leaves, grad)

    out, gradients = run()
    wide = [t.detach().double().requires_grad_() for t in leaves]
    active = reference.swiglu(reference.grouped(wide[0], wide[1], plan, True), wide[3], plan, LIMIT)
    expected = reference.combine(reference.grouped(active, wide[2], plan, False), plan)
    assert error(out, expected) < 6e-3
    for got, right in zip(gradients, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        assert error(got, right) < 1e-2
    for _ in range(4):
        again = run()
        assert torch.equal(again[0], out)
        assert all(torch.equal(a, b) for a, b in zip(again[1], gradients, strict=True))
    with torch.no_grad():
        fused = combine(grouped(activated(x, w13, weights, plan, limit=LIMIT), w2, plan), plan)
    assert torch.equal(fused, out)
    assert paths()["grouped"] == paths()["activated"] == "triton"


@torch.no_grad()
@pytest.mark.parametrize(("width", "inner"), [(2048, 512), (5120, 2304)])
def test_a_row_has_the_same_bits_among_few_and_many_rows(width, inner):
    experts, chosen, tokens = 12, 4, 1500
    ids = _loads("hole", tokens, experts, chosen)
    x, weights = data.normal(tokens, width), torch.rand(tokens, chosen, device="cuda")
    w13 = data.normal(experts + 1, 2 * inner, width, scale=width**-0.5)
    w2 = data.normal(experts + 1, width, inner, scale=inner**-0.5)

    def run(part: slice, few: bool) -> torch.Tensor:
        plan = plan_of(ids[part], experts, 1)
        arguments = x[part], w13, weights[part].contiguous(), plan
        if few:
            rows = few_rows(x[part], w13, w2, weights[part].contiguous(), plan, limit=LIMIT)
            assert rows is not None
        else:
            rows = grouped(activated(*arguments, limit=LIMIT), w2, plan)
            hidden = grouped(x[part], w13, plan, of_tokens=True)
            assert torch.equal(rows, grouped(swiglu(hidden, arguments[2], plan, limit=LIMIT), w2, plan))
        return combine(rows, plan)

    every = run(slice(0, tokens), few=False)
    for start, stop in ((0, 1), (700, 707), (40, 104), (1000, 1200)):
        for few in (False, True):
            assert torch.equal(run(slice(start, stop), few), every[start:stop]), (start, stop, few)


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen"), [(1, 8, 2), (77, 384, 6), (9000, 384, 6), (5000, 12, 4)]
)
def test_route_and_plan(tokens, experts, chosen):
    x, weight = data.normal(tokens, 256), data.normal(experts, 256)
    bias = torch.randn(experts, device="cuda") * 0.1
    arguments = {"chosen": chosen, "factor": 1.5, "temperature": 4.0}
    affinity, ids, weights, loads = route(x, weight, bias, **arguments)
    expected = reference.route(x.double(), weight.double(), bias, chosen, 1.5, 4.0, None)
    assert error(affinity, expected[0]) < 1e-5
    assert error(weights.sum(1), torch.full_like(weights[:, 0], 1.5)) < 1e-6
    right = reference.plan(ids.cpu(), experts, 1)
    for _ in range(3):
        plan = plan_of(ids, experts, 1, loads)
        for name in ("tokens", "place", "ends"):
            assert torch.equal(getattr(plan, name).cpu(), getattr(right, name)), name
        real = right.tiles[:, 0] >= 0
        assert torch.equal(plan.tiles[:, 0].cpu(), right.tiles[:, 0])
        assert torch.equal(plan.tiles.cpu()[real], right.tiles[real])
