"""Experts in FP4: the kernel under the interpreter against its definition, and what is refused."""

from dataclasses import replace

import pytest
import torch

from model.ops.experts import plan_of
from model.ops.packed_experts import Stack, packed_experts, reference
from model.quant.weights import as_pairs, as_words, decode_fp4, encode_fp4

BF16 = torch.bfloat16


def stack(experts: int, shared: int, rows: int, columns: int, scale: float = 0.125) -> Stack:
    """Random matrices with rows of very different sizes."""
    size = torch.exp2(torch.randint(-9, 3, (experts * rows, 1)).float()) * scale
    codes, scales = encode_fp4(torch.randn(experts * rows, columns) * size)
    plain = (torch.randn(shared, rows, columns) * scale).to(BF16)
    return Stack(as_words(codes).view(experts, rows, -1), scales.view(experts, rows, -1), plain)


def problem(tokens=21, experts=6, chosen=2, width=128, inner=128):
    """Arguments of the operation; expert 1 gets nothing."""
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)])
    ids = torch.where(ids == 1, experts - 1, ids)
    plan = plan_of(ids, experts, 1)
    stacks = stack(experts, 1, 2 * inner, width), stack(experts, 1, width, inner)
    return torch.randn(tokens, width).to(BF16), *stacks, torch.rand(tokens, chosen), plan


def _error(got, expected) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("rounded", [False, True])
def test_the_kernel_equals_its_definition(interpreted, rounded):
    pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")
    from model.ops.packed_experts.triton import Tile

    arguments = problem()
    tiles = (Tile(16, 64, 128, 4, 2), Tile(8, 32, 128, 4, 2))
    options = {"limit": 0.5, "rounded": rounded}
    got = interpreted(
        "model.ops.packed_experts.triton", "packed_experts", *arguments, **options, exact=False, tiles=tiles
    )
    assert _error(got, reference.packed_experts(*arguments, **options)) < 6e-3


def test_unpacking_is_exact(interpreted):
    pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")
    held = stack(3, 1, 40, 96)
    got = interpreted("model.ops.packed_experts.triton", "unpack", held.codes, held.scales)
    assert torch.equal(got, torch.stack([held.matrix(expert, BF16) for expert in range(3)]))


def test_chunks_of_unpacked_experts_equal_the_definition(monkeypatch):
    pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")
    from model.ops.packed_experts import chunks

    def unpack(codes, scales):
        zeros = torch.zeros(0, codes.shape[1], codes.shape[2] * 2, dtype=BF16)
        return torch.stack([Stack(codes, scales, zeros).matrix(n) for n in range(len(codes))])

    monkeypatch.setattr(chunks, "unpack", unpack)
    arguments = problem()
    for rounded in (False, True):
        options = {"limit": 0.5, "rounded": rounded}
        expected = reference.packed_experts(*arguments, **options)
        for at_once in (4, None):
            got = chunks.packed_experts(*arguments, **options, at_once=at_once)
            assert torch.equal(got, expected)


def test_the_definition_decodes_each_matrix():
    x, w13, w2, weights, plan = problem()
    hidden = x[plan.tokens.long()].float()
    bounds = [0, *plan.ends.tolist()]
    got = packed_experts(x, w13, w2, weights, plan, limit=0.5)
    for expert in (0, 2, 6):
        rows = slice(bounds[expert], bounds[expert + 1])
        first, second = (
            s.plain[0].float() if expert == 6 else decode_fp4(as_pairs(s.codes[expert]), s.scales[expert])
            for s in (w13, w2)
        )
        gate, up = (hidden[rows] @ first.T).chunk(2, -1)
        gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
        factor = torch.ones(bounds[expert + 1] - bounds[expert])
        for row in range(rows.start, rows.stop if expert < 6 else rows.start):
            token = int(plan.tokens[row])
            factor[row - rows.start] = weights[token, plan.place[token, :2].tolist().index(row)]
        active = gate * torch.sigmoid(gate) * up * factor[:, None]
        assert _error(got[rows], active @ second.T) < 1e-2


def test_shapes_that_do_not_belong_together_are_refused():
    x, w13, w2, weights, plan = problem()
    with pytest.raises(ValueError, match="do not belong together"):
        packed_experts(x, replace(w13, scales=w13.scales[..., :1]), w2, weights, plan, limit=0.5)
    with pytest.raises(ValueError, match="do not belong together"):
        packed_experts(x[:, :64], w13, w2, weights, plan, limit=0.5)
