"""Gradients of a layer's sites on a card: against fp64, at odd sizes, on poisoned memory, and repeated."""

import pytest
import torch

from benchmarks import kernel_data as data
from benchmarks.kernel_data import SCALE, WINDOW
from benchmarks.kernel_timing import error
from model.ops.hyper_boundary import hyper_coefficients, hyper_input, hyper_update
from model.ops.hyper_boundary import reference as boundary
from model.ops.rotary import reference as rotation
from model.ops.rotary import window_keys
from model.ops.sparse_attention import attention_site
from model.ops.sparse_attention import reference as attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def _angles(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(count, 32, device="cuda")
    return angle.cos(), angle.sin()


def _compare(run, define, leaves, bounds):
    """Results and gradients of `run` against `define` on the same leaves in fp64, and against another run."""
    got = run(*leaves)
    grads = [data.normal(*x.shape, dtype=x.dtype) for x in got]
    found = torch.autograd.grad(got, leaves, grads)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = define(*wide)
    for a, b in zip(got, expected, strict=True):
        assert error(a, b) < bounds[0]
    for a, b in zip(found, torch.autograd.grad(expected, wide, [g.double() for g in grads]), strict=True):
        assert b.norm() == 0 or error(a, b) < bounds[1]
    for _ in range(4):
        again = run(*leaves)
        repeated = torch.autograd.grad(again, leaves, grads)
        assert all(torch.equal(a, b) for a, b in zip((*again, *repeated), (*got, *found), strict=True))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kept", [0, 400])
@pytest.mark.parametrize(
    ("count", "heads", "chosen"), [(301, 64, 512), (150, 64, 192), (37, 64, 100), (64, 128, 64), (50, 64, 0)]
)
def test_attention_between_rotations_and_its_projection(count, heads, chosen, kept, exact, monkeypatch):
    from model.ops.sparse_attention import autograd

    monkeypatch.setattr(autograd, "_KEPT_TOKENS", kept)
    x = data.attention(count, 700, heads=heads, topk=chosen)
    keep = torch.randint(0, chosen + 1, (count, 1), device="cuda")
    indices = torch.where(torch.arange(chosen, device="cuda") < keep, x.indices, -1)
    angles, weight = _angles(count), data.normal(8, 96, heads * 64, scale=(heads * 64) ** -0.5)
    leaves = [t.requires_grad_() for t in (x.query, x.entries, x.window, x.sink, weight)]
    last = torch.arange(count, dtype=torch.int32, device="cuda")

    def run(query, entries, window, sink, matrices):
        own = query.clone()
        where = (entries, indices, window, x.first, sink, angles, matrices)
        out, _, turned = attention_site(own, *where, scale=SCALE, exact=exact)
        assert turned.data_ptr() == own.data_ptr() and not turned.requires_grad
        return (out,)

    def define(query, entries, window, sink, matrices):
        turn = [a.double() for a in angles]
        turned = _turned(query, *turn)
        options = {"scale": SCALE, "window_size": WINDOW}
        out, _ = attention.forward(turned, entries, indices, window, x.first, last, sink, **options)
        out = _turned(out, turn[0], -turn[1]).flatten(1).unflatten(1, (8, -1))
        return (torch.einsum("tgk,gnk->tgn", out, matrices).flatten(1),)

    _compare(run, define, leaves, (4e-3, 7e-3))


def _turned(x, cosine, sine):
    """`rotation.rotary` without its float32."""
    even, odd = x[..., -64:].unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = (a[:, None] for a in (cosine, sine))
    pairs = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1)
    return torch.cat([x[..., :-64], pairs.flatten(-2)], -1)


@pytest.mark.parametrize("rounded", [False, True])
def test_window_keys(rounded):
    cosine, sine = _angles(517)
    values, norm = data.normal(517, 512).requires_grad_(), (data.normal(512) + 1).requires_grad_()
    keys = window_keys(values, norm, cosine, sine, eps=1e-6, rounded=rounded)
    grad = data.normal(517, 512)
    found = torch.autograd.grad(keys, (values, norm), grad)
    wide = [x.detach().float().requires_grad_() for x in (values, norm)]
    expected = rotation.window_keys(wide[0], wide[1], cosine, sine, eps=1e-6, rounded=False)[0]
    for a, b in zip(found, torch.autograd.grad(expected, wide, grad.float()), strict=True):
        assert error(a, b) < 4e-3


@pytest.mark.parametrize(("count", "width"), [(1, 64), (133, 320), (301, 2048), (67, 5120)])
def test_a_site_of_hyper_connections(count, width):
    streams, branch, norm = data.normal(count, 4, width), data.normal(count, width), data.normal(width) + 1
    projection = data.normal(24, 4 * width, dtype=torch.float32, scale=width**-0.5)
    base, scale = torch.randn(24, device="cuda") * 0.3, torch.tensor([0.7, 0.5, 0.9], device="cuda")
    leaves = [x.requires_grad_() for x in (streams, branch, norm, projection, base, scale)]

    def run(x, y, weight, matrix, b, s):
        squares = x.detach().float().square().sum((1, 2))
        k, x = hyper_coefficients(x, squares, matrix, b, s)
        after, normed, _ = hyper_update(x, y, k, weight, eps=1e-6)
        return after, normed, hyper_input(after, k, weight, eps=1e-6)[0], k

    def define(x, y, weight, matrix, b, s):
        k = _wide_coefficients(x, matrix, b, s)
        mixed = torch.einsum("tio,tid->tod", k[:, 8:].unflatten(1, (4, 4)), x)
        after = k[:, 4:8, None] * y[:, None] + mixed
        mix = torch.einsum("ts,tsd->td", k[:, :4], after)
        normed = mix * torch.rsqrt(mix.square().mean(1, keepdim=True) + 1e-6) * weight
        return after, normed, normed, k

    _compare(run, define, leaves, (8e-3, 1.2e-2))


def _wide_coefficients(x, matrix, base, scale):
    """`boundary.coefficients` in fp64."""
    flat = x.flatten(1)
    m = (flat @ matrix.T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + 1e-20)
    m = m * scale.repeat_interleave(torch.tensor([4, 4, 16], device=x.device)) + base
    gates = torch.sigmoid(m[:, :4]) + 1e-6, 2 * torch.sigmoid(m[:, 4:8])
    return torch.cat([*gates, boundary.sinkhorn(m[:, 8:].unflatten(1, (4, 4))).flatten(1)], 1)
