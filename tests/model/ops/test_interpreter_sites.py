"""Kernels of a layer's sites under Triton's interpreter at small shapes, against their definitions."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")

from model.ops.decode_rows import decode_rows
from model.ops.hyper_boundary import reference as boundary
from model.ops.index_decode import reference as index_decode
from model.ops.records import pack, unpack
from model.ops.rotary import reference as rotary
from model.ops.sparse_attention import reference as attention

BF16 = torch.bfloat16


def _error(got, expected) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def _angles(count=5, width=16):
    angle = torch.randn(count, width // 2)
    return angle.cos(), angle.sin()


def test_rotary_and_back(interpreted):
    torch.manual_seed(0)
    x, angles = torch.randn(5, 3, 64).to(BF16), _angles()
    turned = interpreted("model.ops.rotary.triton", "rotary_", x.clone(), *angles, 1.0)
    assert torch.equal(turned, rotary.rotary(x, *angles))
    back = interpreted("model.ops.rotary.triton", "rotary_", turned.clone(), *angles, -1.0)
    assert _error(back, x) < 4e-3
    assert torch.equal(back[..., :48], x[..., :48])


@pytest.mark.parametrize("rounded", [True, False])
def test_window_keys(interpreted, rounded):
    torch.manual_seed(0)
    values, norm, angles = torch.randn(5, 64).to(BF16), torch.rand(64).to(BF16), _angles()
    keys = interpreted(
        "model.ops.rotary.triton", "window_keys", values, norm, *angles, eps=1e-6, rounded=rounded
    )
    expected, _ = rotary.window_keys(values, norm, *angles, eps=1e-6, rounded=rounded)
    assert torch.equal(keys, expected)


def test_gradient_of_window_keys(interpreted):
    torch.manual_seed(0)
    values, norm, angles = torch.randn(11, 64).to(BF16), torch.rand(64).to(BF16), _angles(11)
    wide = [x.float().requires_grad_() for x in (values, norm)]
    grad = torch.randn(11, 64).to(BF16)
    rotary.window_keys(*wide, *angles, eps=1e-6, rounded=True)[0].backward(grad.float())
    got = interpreted(
        "model.ops.rotary.triton", "window_keys_backward", values, norm, *angles, grad, eps=1e-6
    )
    for have, want in zip(got, wide, strict=True):
        assert _error(have, want.grad) < 4e-3


def test_index_heads_are_what_their_records_decode_to(interpreted):
    torch.manual_seed(0)
    x, angles = torch.randn(5, 4, 64).to(BF16), _angles()
    got = interpreted("model.ops.rotary.triton", "index_heads", x, *angles, rounded=True)
    assert torch.equal(got, unpack("index", pack("index", rotary.rotary(x, *angles))).to(BF16))


def _site(count=7, width=96):
    torch.manual_seed(0)
    streams, branch, norm = torch.randn(count, 4, width), torch.randn(count, width), torch.rand(width)
    base, scale = torch.randn(24) * 0.3, torch.tensor([0.7, 0.5, 0.9])
    coefficient = boundary.coefficients(streams, torch.randn(24, 4 * width) * 0.05, base, scale)
    return streams.to(BF16), branch.to(BF16), coefficient, norm.to(BF16), base, scale


@pytest.mark.parametrize("width", [96, 320])
def test_gradient_of_a_site(interpreted, width):
    streams, branch, coefficient, norm, *_ = _site(width=width)
    wide = [x.float().requires_grad_() for x in (streams, branch, coefficient, norm)]
    updated, normed, _ = boundary.update(*wide, 1e-6)
    grads = torch.randn_like(updated).to(BF16), torch.randn_like(normed).to(BF16)
    ((updated * grads[0].float()).sum() + (normed * grads[1].float()).sum()).backward()
    after = boundary.update(streams, branch, coefficient, norm, 1e-6)[0]
    got = interpreted(
        "model.ops.hyper_boundary.gradients", "site_backward",
        *(streams, after, branch, coefficient, norm, 1e-6, *grads),
    )  # fmt: skip
    for have, want in zip(got, wide, strict=True):
        assert _error(have, want.grad) < 4e-3


def test_input_of_a_site_and_its_gradient(interpreted):
    streams, _, coefficient, norm, *_ = _site()
    module = "model.ops.hyper_boundary.gradients"
    got = interpreted(module, "site_input", streams, coefficient, norm, 1e-6)
    expected = boundary.site_input(streams, coefficient, norm, 1e-6)
    assert torch.equal(got[0], expected[0])
    assert _error(got[1], expected[1]) < 1e-6
    wide = [x.float().requires_grad_() for x in (streams, coefficient, norm)]
    grad = torch.randn_like(got[0])
    boundary.site_input(*wide, 1e-6)[0].backward(grad.float())
    arguments = (None, streams, None, coefficient, norm, 1e-6, None, grad)
    grads = interpreted(module, "site_backward", *arguments)
    assert grads[1] is None
    for have, want in zip((grads[0], grads[2], grads[3]), wide, strict=True):
        assert _error(have, want.grad) < 4e-3


def test_a_projection_in_two_parts(interpreted):
    projection = torch.randn(24, 160)
    split = interpreted("model.ops.hyper_boundary.triton", "split_projection", projection)
    high, low = split.unflatten(1, (2, 32)).unbind(1)
    assert torch.equal(high[:, :24], projection.to(BF16).T)
    assert torch.equal(low[:, :24], (projection - projection.to(BF16).float()).to(BF16).T)
    assert not high[:, 24:].any() and not low[:, 24:].any()


@pytest.mark.parametrize("added", [True, False])
def test_gradient_of_coefficients_runs_the_rounds_backwards(interpreted, added):
    *_, base, scale = _site()
    streams, projection = torch.randn(40, 4, 40).to(BF16), torch.randn(24, 160) * 0.2
    wide = [x.float().requires_grad_() for x in (streams, projection, base, scale)]
    grad, other = torch.randn(40, 24), torch.randn_like(streams) if added else None
    boundary.coefficients(*wide).backward(grad)
    split = interpreted("model.ops.hyper_boundary.triton", "split_projection", projection)
    module, flat = "model.ops.hyper_boundary.gradients", streams.float().flatten(1)
    products, squares = flat @ split.float(), flat.square().sum(1)
    raw, shrink, *sums = interpreted(
        module, "logit_gradients", products, squares, base, scale, grad, flat.shape[1]
    )
    assert not raw[:, 24:].any()
    assert _error(raw[:, :24].float().t() @ flat, wide[1].grad) < 4e-3
    assert _error(sums[0], wide[2].grad) < 1e-5
    assert _error(sums[1], wide[3].grad) < 1e-4
    got = interpreted(module, "stream_gradients", streams, raw, shrink, split, other)
    assert _error(got, wide[0].grad + (0 if other is None else other.float())) < 6e-3


@pytest.mark.parametrize("listed", [False, True])
def test_scores_from_records_on_pages(interpreted, listed):
    torch.manual_seed(0)
    query, weights = torch.randn(2, 8, 64).to(BF16), torch.randn(2, 8)
    weights = weights.to(BF16) if listed else weights
    records, table = pack("index", torch.randn(40, 64)), torch.tensor([[3, 1, 4, 0, 2], [2, 0, 1, 3, 4]])
    ends = torch.tensor([17, 30], dtype=torch.int32)
    blocks = torch.tensor([[0, 2, 3, -1], [1, 2, 5, 6]], dtype=torch.int32) if listed else None
    options = {"width": 16 if listed else 37, "page_groups": 8, "blocks": blocks, "block_size": 4}
    options["factor"] = 0.3
    arguments = (query, weights, records, table, ends)
    got = interpreted("model.ops.index_decode.triton", "decode_scores", *arguments, **options)
    expected = index_decode.decode_scores(*arguments, **options)
    assert torch.equal(got.isinf(), expected.isinf())
    assert _error(got[~got.isinf()], expected[~expected.isinf()]) < 1e-6


def test_rows_of_chosen_keys(interpreted):
    chosen = torch.tensor([[0, 5, 9, -1], [2, 3, -1, -1]], dtype=torch.int32)
    table = torch.randperm(60).view(2, 30)
    others = torch.tensor([7, 0], dtype=torch.int32)
    got = interpreted("model.ops.decode_rows.triton", "decode_rows", chosen, table, others, 4)
    expected = decode_rows(chosen, table, others, page_groups=4)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_exact_product_gives_a_row_the_same_bits_among_few_and_many(interpreted):
    torch.manual_seed(0)
    x, weight = torch.randn(1, 300, 256).to(BF16), torch.randn(1, 80, 256).to(BF16)
    products = [
        interpreted("model.ops.exact_linear.triton", "product", x[:, :n], weight, torch.empty(1, n, 80))
        for n in (10, 300)
    ]
    assert _error(products[1], x.double() @ weight.double().transpose(1, 2)) < 1e-6
    assert torch.equal(products[0], products[1][:, :10])


def test_coefficients_are_the_same_bits_in_parts_and_together(interpreted):
    torch.manual_seed(0)
    streams, projection = torch.randn(600, 4, 64).to(BF16).repeat(29, 1, 1), torch.randn(24, 256) * 0.05
    base, scale = torch.randn(24) * 0.3, torch.tensor([0.7, 0.5, 0.9])
    module = "model.ops.hyper_boundary.triton"
    squares = streams.float().square().sum((1, 2))
    split = interpreted(module, "split_projection", projection)
    # The second call with few rows finds the counters as the first left them.
    few, again, many, most = (
        interpreted(module, "coefficients", streams[:n], squares[:n], split, base, scale)
        for n in (70, 70, 600, len(streams))
    )
    assert _error(many, boundary.coefficients(streams[:600], projection, base, scale)) < 1e-4
    assert torch.equal(few, again)
    assert torch.equal(few, many[:70])
    assert torch.equal(many, most[:600])


def test_gradients_through_an_attention_site(interpreted):
    torch.manual_seed(0)
    count, entries, heads, width = 20, 30, 4, 64
    indices = torch.stack([torch.randperm(entries)[:20].sort().values for _ in range(count)]).int()
    indices[3, 4:] = -1
    first, angles = torch.where(torch.arange(count) < 13, 0, 13).int(), _angles(count)
    shapes = (count, heads, width), (entries, width), (count, width), (2, 24, heads * width // 2)
    query, keys, window, weight = (torch.randn(*shape).to(BF16) for shape in shapes)
    leaves = [query, keys, window, torch.randn(heads), weight / 8]
    grad = torch.randn(count, 48).to(BF16)
    got = interpreted("tests.model.ops.site_gradients", "of_attention", leaves, indices, first, angles, grad)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    turned = rotary.rotary(wide[0], *angles)
    options = {"scale": width**-0.5, "window_size": 12}
    own = torch.arange(count).int()
    out, _ = attention.forward(turned, wide[1], indices, wide[2], first, own, wide[3], **options)
    out = rotary.rotary(out, angles[0], -angles[1]).flatten(1).unflatten(1, (2, -1))
    out = torch.einsum("tgk,gnk->tgn", out, wide[4]).flatten(1)
    expected = [out, *torch.autograd.grad(out, wide, grad.float())]
    for have, want in zip(got, expected, strict=True):
        assert _error(have, want) < 8e-3


def test_gradients_through_a_site_of_hyper_connections(interpreted):
    streams, branch, _, norm, base, scale = _site(width=64)
    leaves = [streams, branch, norm, torch.randn(24, 256) * 0.1, base, scale]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    k = boundary.coefficients(wide[0], *wide[3:])
    after, normed, _ = boundary.update(wide[0], wide[1], k, wide[2], 1e-6)
    results = after, normed, boundary.site_input(after, k, wide[2], 1e-6)[0], k
    grads = [
        torch.randn_like(x).to(BF16).to(y) for x, y in zip(results, (BF16, BF16, BF16, k.dtype), strict=True)
    ]
    got = interpreted("tests.model.ops.site_gradients", "of_hyper_connections", leaves, grads)
    expected = [*results, *torch.autograd.grad(results, wide, [g.float() for g in grads])]
    for have, want in zip(got, expected, strict=True):
        assert _error(have, want) < 1e-2
