"""Experts in FP4 on a card: against fp64, at odd sizes, on poisoned memory, and repeated."""

import pytest
import torch

from benchmarks.kernel_timing import error
from model.ops.dispatch import paths, reference_only
from model.ops.experts import plan_of
from model.ops.packed_experts import Stack, packed_experts
from model.ops.packed_experts import reference as definition
from model.ops.packed_experts.triton import unpack
from model.quant.weights import as_words, encode_fp4

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def _stack(experts: int, rows: int, columns: int) -> Stack:
    """Random matrices with rows of very different sizes, and a shared one."""
    scale = columns**-0.5 * torch.exp2(torch.randint(-6, 3, (experts * rows, 1), device="cuda").float())
    codes, scales = encode_fp4(torch.randn(experts * rows, columns, device="cuda") * scale)
    plain = (torch.randn(1, rows, columns, device="cuda") * columns**-0.5).bfloat16()
    return Stack(as_words(codes).view(experts, rows, -1), scales.view(experts, rows, -1), plain)


@pytest.fixture(scope="module")
def stacks() -> dict[tuple[int, int, int], tuple[Stack, Stack]]:
    torch.manual_seed(0)
    shapes = [(384, 5120, 128), (9, 5120, 2304), (12, 96, 160)]
    return {(n, d, f): (_stack(n, 2 * f, d), _stack(n, d, f)) for n, d, f in shapes}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 700, 2000, 9000])
@pytest.mark.parametrize("shape", [(384, 5120, 128), (9, 5120, 2304), (12, 96, 160)])
def test_packed_experts(stacks, shape, tokens, exact):
    torch.manual_seed(tokens)
    experts, width, _ = shape
    first, second = stacks[shape]
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    # Some experts get most tokens and others none.
    likely = torch.rand(experts, device="cuda") ** 4
    ids = torch.multinomial((likely + 1e-6).expand(tokens, -1), 6)
    weights = torch.rand(tokens, 6, device="cuda")
    plan = plan_of(ids, experts, 1)
    options = {"limit": 2.0}
    got = packed_experts(x, first, second, weights, plan, **options, exact=exact)
    assert paths()["packed_experts"] == "triton"
    matrix = first.matrix(experts - 1)
    assert torch.equal(unpack(first.codes[-1:], first.scales[-1:])[0], matrix)
    with reference_only():
        wide = x.double(), first, second, weights.double(), plan
        expected = definition.packed_experts(*wide, **options, rounded=False)
    assert error(got, expected) < 6e-3
    for _ in range(4):
        assert torch.equal(packed_experts(x, first, second, weights, plan, **options, exact=exact), got)
    if exact:
        rows = plan.place.long()
        for some in ([0], list(range(min(5, tokens)))):
            part = plan_of(ids[some], experts, 1)
            alone = packed_experts(x[some], first, second, weights[some], part, **options, exact=True)
            assert torch.equal(alone[part.place.long()], got[rows[some]])
