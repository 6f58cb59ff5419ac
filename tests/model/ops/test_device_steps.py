"""Kernels of losses and the n-gram memory on a card: against fp64, at odd sizes, and repeated."""

import pytest
import torch

from benchmarks import kernel_data as data
from benchmarks.kernel_data import SCALE
from benchmarks.kernel_timing import error
from model.ops.dispatch import reference_only
from model.ops.engram_gate import engram_gate
from model.ops.engram_gate import reference as gate
from model.ops.index_loss import index_loss
from model.ops.index_loss import reference as index_definition
from model.ops.linear_reverse_kl import linear_reverse_kl
from model.ops.linear_reverse_kl import reference as kl_definition
from model.ops.row_sums import row_sums
from model.ops.sparse_attention import sparse_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize(("count", "vocabulary", "widths"), [(1, 1000, (64, 128)), (300, 5001, (256, 64))])
def test_linear_reverse_kl(count, vocabulary, widths):
    hidden, other = (data.normal(count, width) for width in widths)
    weight, head = (data.normal(vocabulary, width, scale=2 * width**-0.5) for width in widths)
    leaves, grad = [hidden.requires_grad_(), weight.requires_grad_()], torch.randn(count, device="cuda")
    got = linear_reverse_kl(*leaves, other, head, temperature=0.8)
    found = torch.autograd.grad(got, leaves, grad)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = kl_definition.linear_reverse_kl(*wide, other.double(), head.double(), temperature=0.8)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
    for a, b in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        assert error(a, b) < 8e-3
    for _ in range(4):
        again = linear_reverse_kl(*leaves, other, head, temperature=0.8)
        assert torch.equal(again, got)
        repeated = torch.autograd.grad(again, leaves, grad)
        assert all(torch.equal(a, b) for a, b in zip(repeated, found, strict=True))
    alone = linear_reverse_kl(hidden[:1], weight, other[:1], head, temperature=0.8)
    assert torch.equal(alone, got[:1])


@pytest.mark.parametrize(("heads", "chosen"), [(64, 512), (128, 64), (16, 100)])
def test_index_loss(heads, chosen):
    x = data.attention(301, 700, heads=heads, topk=chosen)
    leaves = [data.normal(301, 32, 128), torch.randn(301, 32, device="cuda") * 0.05, data.normal(700, 128)]
    leaves = [t.requires_grad_() for t in leaves]
    lse = sparse_attention(x.query, x.entries, x.indices, x.window, x.first, x.sink, scale=SCALE)[1]
    grad = torch.rand(301, device="cuda")
    got = index_loss(*leaves, x.query, x.entries, lse, x.indices, scale=SCALE)
    found = torch.autograd.grad(got, leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    teacher = x.query.double(), x.entries.double(), lse.double(), x.indices
    expected = index_definition.index_loss(*wide, *teacher, scale=SCALE)
    assert error(got, expected) < 1e-3
    for a, b in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        assert error(a, b) < 5e-3
    for _ in range(4):
        again = index_loss(*leaves, x.query, x.entries, lse, x.indices, scale=SCALE)
        repeated = torch.autograd.grad(again, leaves, grad)
        assert torch.equal(again, got)
        assert all(torch.equal(a, b) for a, b in zip(repeated, found, strict=True))


@pytest.mark.parametrize(("count", "n", "width"), [(1, 4, 64), (513, 4, 5120), (65, 2, 1536)])
def test_engram_gate(count, n, width):
    leaves = [data.normal(count, n, width), data.normal(count, (n + 1) * width)]
    leaves += [data.normal(n, width) + 1 for _ in range(2)]
    leaves = [t.requires_grad_() for t in leaves]
    grad, text = data.normal(count, n, width), torch.rand(count, device="cuda") < 0.8
    for mask in (None, text):
        got = engram_gate(*leaves, mask, eps=1e-6)
        found = torch.autograd.grad(got, leaves, grad)
        wide = [t.detach().double().requires_grad_() for t in leaves]
        expected = gate.engram_gate(*wide, mask, eps=1e-6)
        assert error(got, expected) < 3e-3
        for a, b in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
            assert error(a, b) < 8e-3
        again = torch.autograd.grad(engram_gate(*leaves, mask, eps=1e-6), leaves, grad)
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


@pytest.mark.parametrize("width", [32, 200, 256])
def test_row_sums(width):
    ids = (torch.rand(5001, device="cuda") ** 4 * 900).long()
    values = data.normal(5001, width)
    rows, sums = row_sums(values, ids)
    with reference_only():
        expected_rows, expected = row_sums(values.double(), ids)
    assert torch.equal(rows, expected_rows) and error(sums, expected) < 1e-5
    assert torch.equal(row_sums(values, ids)[1], sums)
