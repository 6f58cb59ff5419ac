import pytest
import torch

from model.layers.indexer import IndexQueries
from model.layers.indexer_loss import Teacher, indexer_loss
from model.ops.index_loss import index_loss, reference
from model.ops.sparse_attention import invert
from model.ops.sparse_attention import reference as attention

T, G, C, D, E, K = 21, 8, 32, 64, 40, 12
SCALE = D**-0.5


def inputs(dtype, heads_count=4):
    torch.manual_seed(0)
    indices = torch.stack([torch.randperm(E)[:K].sort().values for _ in range(T)]).int()
    indices[0], indices[1, 1:], indices[2, 5:] = -1, -1, -1
    heads, query = torch.randn(T, G, C).to(dtype), torch.randn(T, heads_count, D).to(dtype) * 2
    keys, entries = torch.randn(E, C).to(dtype), torch.randn(E, D).to(dtype)
    weights = torch.randn(T, G).to(torch.promote_types(dtype, torch.float32)) * 0.1
    window, first, sink = torch.randn(T, D).to(dtype), torch.zeros(T).int(), torch.randn(heads_count)
    _, lse = attention.forward(
        query, entries, indices, window, first, torch.arange(T).int(), sink, scale=SCALE, window_size=4
    )
    return (heads, weights, keys, query, entries, lse, indices), (window, sink)


def test_equals_the_loss_of_the_pass_on_rows():
    (heads, weights, keys, query, entries, lse, indices), (window, sink) = inputs(torch.float32)
    losses = index_loss(heads, weights, keys, query, entries, lse, indices, scale=SCALE)
    at = torch.arange(T)
    seen = (at[:, None] - at >= 0) & (at[:, None] - at < 4)
    chosen = torch.zeros(T, E + 1, dtype=torch.bool).scatter_(1, indices.clamp_min(-1).long() % (E + 1), True)
    chosen = chosen[:, :E]
    blocked = ~torch.cat([seen, chosen], 1)[None]
    teacher = Teacher(query[None], torch.cat([window, entries])[None], blocked, sink)
    queries = IndexQueries(heads[None], weights[None])
    total, count = indexer_loss(
        queries, keys[None], teacher, chosen[None], torch.ones(1, T, dtype=torch.bool)
    )
    torch.testing.assert_close(losses.sum(), total)
    assert int(count) == T - 1 and losses[0] == 0 and (losses[2:] > 0).all()


def test_gradients_of_the_student():
    arguments, _ = inputs(torch.float64)
    rows = (slice(6), slice(6), slice(None))
    student = [x[part].clone().requires_grad_() for x, part in zip(arguments[:3], rows, strict=True)]
    query, entries, lse, indices = arguments[3][:6], arguments[4], arguments[5][:6], arguments[6][:6]
    assert torch.autograd.gradcheck(
        lambda a, w, k: index_loss(a, w, k, query, entries, lse, indices, scale=SCALE), tuple(student)
    )


def test_arguments_that_do_not_fit_are_refused():
    arguments, _ = inputs(torch.float32)
    with pytest.raises(ValueError, match="must agree"):
        index_loss(*arguments[:6], arguments[6][:-1], scale=SCALE)


@pytest.mark.parametrize("heads", [16, 128])
def test_kernel(interpreted, heads):
    arguments, _ = inputs(torch.bfloat16, heads)
    module = "model.ops.index_loss.triton"
    losses, slopes = interpreted(module, "forward", *arguments, scale=SCALE)
    leaves = [x.double().requires_grad_() for x in arguments[:3]]
    expected = reference.index_loss(*leaves, *(x.double() for x in arguments[3:6]), arguments[6], scale=SCALE)
    torch.testing.assert_close(losses.double(), expected.detach(), atol=2e-4, rtol=1e-3)
    grad = torch.rand(T) + 0.5
    found = interpreted(
        module,
        "backward",
        *arguments[:3],
        arguments[6],
        slopes,
        grad,
        invert(arguments[6], E, chunk=8),
    )
    for got, wanted in zip(found, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        assert (got.double() - wanted).norm() < 6e-3 * wanted.norm()
