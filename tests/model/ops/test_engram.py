import pytest
import torch

from model.ops.engram_gate import engram_gate, reference
from model.ops.row_sums import distinct, row_sums


def inputs(count, n, width, dtype):
    torch.manual_seed(0)
    streams, projected = torch.randn(count, n, width), torch.randn(count, (n + 1) * width)
    weights = torch.rand(n, width) + 0.5, torch.rand(n, width) + 0.5
    text = torch.rand(count) < 0.7
    return [x.to(dtype) for x in (streams, projected, *weights)], text


def test_a_key_that_fits_opens_the_gate():
    (x, projected, q, k), _ = inputs(3, 2, 8, torch.float64)
    fits = torch.cat([x.flatten(1) / (q * k).flatten(), projected[:, 16:]], 1)
    opened = engram_gate(x, fits, q, k, None, eps=1e-6) - x
    against = torch.cat([-fits[:, :16], fits[:, 16:]], 1)
    closed = engram_gate(x, against, q, k, None, eps=1e-6) - x
    value = projected[:, None, 16:]
    torch.testing.assert_close(opened + closed, value.expand_as(x))
    assert ((opened / value) > 0.7).all()
    assert torch.equal(engram_gate(x, fits, q, k, torch.zeros(3).bool(), eps=1e-6), x)


def test_gradients():
    tensors, text = inputs(4, 2, 6, torch.float64)
    leaves = [x.requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *x: engram_gate(*x, text, eps=1e-6), tuple(leaves))


def test_arguments_that_do_not_fit_are_refused():
    (x, projected, q, k), _ = inputs(3, 2, 8, torch.float32)
    with pytest.raises(ValueError, match="must agree"):
        engram_gate(x, projected[:, :-1], q, k, None, eps=1e-6)
    with pytest.raises(ValueError, match="one id a row"):
        row_sums(x[0], torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(("count", "n", "width"), [(9, 4, 1200), (9, 3, 40), (140, 2, 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_kernel(interpreted, count, n, width, masked):
    tensors, text = inputs(count, n, width, torch.bfloat16)
    tensors[1][0, :width] = 0
    text = text if masked else None
    grad = torch.randn(count, n, width).bfloat16()
    leaves = [x.double().requires_grad_() for x in tensors]
    expected = reference.engram_gate(*leaves, text, eps=1e-6)
    module = "model.ops.engram_gate.triton"
    out = interpreted(module, "forward", *tensors, text, eps=1e-6)
    assert (out.double() - expected).norm() < 4e-3 * expected.norm()
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    got = list(interpreted(module, "backward", *tensors, text, grad, eps=1e-6))
    got[2:] = [got[2] * tensors[3].float(), got[2] * tensors[2].float()]
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b).norm() < 5e-3 * b.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_over_equal_ids(interpreted, dtype):
    torch.manual_seed(0)
    ids = torch.cat([torch.randint(0, 9, (30,)), torch.full((140,), 77)])
    values = torch.randn(170, 24).to(dtype)
    rows, order, ends = distinct(ids)
    sums = interpreted("model.ops.row_sums.triton", "launch", values, order, ends)
    expected_rows, expected = row_sums(values, ids)
    assert torch.equal(rows, expected_rows) and sums.dtype == expected.dtype
    torch.testing.assert_close(sums, expected)
    torch.testing.assert_close(expected[-1], values[30:].to(expected.dtype).sum(0))
