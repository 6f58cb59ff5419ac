"""Every kernel under Triton's interpreter at small shapes, against its definition."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")

from model.ops.candidates import reference as candidate
from model.ops.hyper_boundary import reference as boundary
from model.ops.indexer import reference as indexer
from model.ops.linear_logprob import reference as logprob
from model.ops.pack_keys import reference as packing
from model.ops.records import pack, unpack
from model.ops.sparse_attention import invert
from model.ops.sparse_attention import reference as attention
from model.ops.sparse_attention.backward import Saved
from model.ops.sparse_decode import reference as decode
from model.ops.sparse_decode.triton import Tiling
from model.ops.topk import reference as topk
from model.ops.topk.triton import Tuning

D, H, SCALE = 64, 16, 0.125


def _error(got, expected) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def _selection(rows, entries, k):
    return torch.stack([torch.randperm(entries)[:k].sort().values for _ in range(rows)]).int()


@pytest.mark.parametrize("cut", [Tiling(1, 2, 16, 16, 4, 1, False), Tiling(2, 1, 16, 16, 4, 1, True)])
def test_decode(interpreted, cut):
    torch.manual_seed(0)
    records, window = pack("main", torch.randn(30, D)), pack("window", torch.randn(20, D))
    indices, recent = _selection(2, 30, 24), _selection(2, 20, 16)
    indices[0, 5:], recent[1, 3:] = -1, -1
    query, sink = torch.randn(2, H, D).bfloat16(), torch.randn(H)
    arguments = (query, records, indices, window, recent, sink)
    module, angles = "model.ops.sparse_decode.triton", torch.randn(2, 32)
    few, many = angles[:, :8], angles[:, :32]
    for rope in (None, (few.cos(), few.sin()), (many.cos(), many.sin())):
        out = interpreted(module, "decode", *arguments, scale=SCALE, cut=cut, rope=rope)
        assert _error(out, decode.decode(query.float(), *arguments[1:], scale=SCALE, rope=rope)) < 4e-3


def test_attention_forward_and_backward(interpreted):
    torch.manual_seed(0)
    count, entries, window_size = 20, 30, 12
    indices = _selection(count, entries, 20)
    indices[3, 4:] = -1
    first = torch.where(torch.arange(count) < 13, 0, 13).int()
    last = torch.arange(count).int()
    query, keys, window = (torch.randn(*s).bfloat16() for s in ((count, H, D), (entries, D), (count, D)))
    sink, grad = torch.randn(H), torch.randn(count, H, D).bfloat16()
    module = "model.ops.sparse_attention.triton"
    rows = interpreted(
        module, "joint_rows", indices, first, last, entries=entries, window_size=window_size, width=D
    )
    table = torch.cat([keys, window])
    out, lse = interpreted(module, "forward", query, table, rows, sink, scale=SCALE)

    wide = [x.double().requires_grad_() for x in (query, keys, window, sink)]
    expected, expected_lse = attention.forward(
        wide[0], wide[1], indices, wide[2], first, last, wide[3], scale=SCALE, window_size=window_size
    )
    assert _error(out, expected) < 4e-3
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)

    site = "tests.model.ops.site_gradients"
    again, exact_lse, kept, tops = interpreted(site, "kept_probabilities", query, table, rows, sink, SCALE)
    assert _error(again, expected) < 4e-3
    scores = torch.einsum("thd,tkd->thk", wide[0], table.double()[rows.rows.clamp_min(0).long()]) * SCALE
    right = (scores - expected_lse[:, :, None]).exp() * (rows.rows >= 0)[:, None]
    factor = tops.repeat_interleave(rows.block, 1).transpose(1, 2) * SCALE - exact_lse[:, :, None]
    assert _error(kept * factor.exp(), right.detach()) < 4e-3

    saved = Saved(query, table, rows, indices, out, lse, SCALE, window_size, entries)
    inverse = invert(indices, entries, chunk=16)
    got = interpreted(
        "model.ops.sparse_attention.backward", "backward", saved, grad, inverse, torch.zeros(count, H)
    )
    gradients = torch.autograd.grad(expected, wide, grad.double())
    assert _error(got[0], gradients[0]) < 4e-3
    assert _error(got[1], torch.cat(gradients[1:3])) < 5e-3
    assert _error(-(torch.exp(sink - lse) * got[2]).sum(0), gradients[3]) < 8e-3


def _awkward_scores(rows, width):
    scores = torch.randn(rows, width)
    scores[0] = torch.round(scores[0] * 2)
    scores[-1, width // 2 :] = float("-inf")
    scores[-1, 7] = float("nan")
    return scores


@pytest.mark.parametrize(("width", "k"), [(40, 64), (5000, 17)])
def test_topk(interpreted, width, k):
    torch.manual_seed(0)
    scores = _awkward_scores(2, width)
    ranges = {"begins": torch.tensor([3, 0]).int(), "ends": torch.tensor([width - 5, width // 3]).int()}
    got = interpreted("model.ops.topk.triton", "topk", scores, k, **ranges)
    assert torch.equal(got, topk.topk(scores, k, **ranges))


@pytest.mark.parametrize("tuning", [None, Tuning(most=1024, maxima=256)])
def test_topk_of_rows_with_long_ties(interpreted, tuning):
    torch.manual_seed(0)
    scores = torch.relu(torch.randn(2, 5000) - 2.5)
    scores[1] = torch.round(torch.randn(5000) * 2)
    got = interpreted("model.ops.topk.triton", "topk", scores, 100, tuning=tuning)
    assert torch.equal(got, topk.topk(scores, 100))


def test_indexer(interpreted):
    torch.manual_seed(0)
    query, keys, weights = (
        torch.randn(6, 32, 32).bfloat16(),
        torch.randn(150, 32).bfloat16(),
        torch.randn(6, 32),
    )
    ranges = {
        "begins": torch.tensor([0, 0, 0, 90, 90, 90]).int(),
        "ends": torch.tensor([0, 50, 88, 91, 130, 150]).int(),
    }
    got = interpreted("model.ops.indexer.triton", "index_topk", query, keys, weights, 16, **ranges)
    assert torch.equal(got, indexer.index_topk(query, keys, weights, 16, **ranges))


def test_linear_logprob(interpreted):
    torch.manual_seed(0)
    count, vocabulary, width, temperature = 20, 300, 64, 0.7
    hidden, weight = torch.randn(count, width).bfloat16(), (torch.randn(vocabulary, width) * 0.3).bfloat16()
    labels = torch.randint(0, vocabulary, (count,))
    module = "model.ops.linear_logprob.triton"
    labels[::2] = (hidden.float() @ weight.float().T).argmax(1)[::2]
    value, entropy, lse, correct = interpreted(
        module, "forward", hidden, weight, labels, temperature=temperature
    )
    logits = (hidden.double() @ weight.double().T).requires_grad_()
    expected = logprob.linear_logprob(
        logits, torch.eye(vocabulary, dtype=torch.float64), labels, temperature=temperature
    )
    torch.testing.assert_close(value.double(), expected[0].detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected[1].detach(), atol=1e-5, rtol=0)
    assert correct.tolist() == expected[2].tolist() and correct[::2].all() and not correct.all()

    grads = torch.randn(count), torch.randn(count)
    (gradient,) = torch.autograd.grad(expected[:2], logits, [g.double() for g in grads])
    for columns in (slice(0, 256), slice(256, 300)):
        got = interpreted(
            module,
            "logit_gradients",
            *(hidden, weight, labels, lse, entropy, *grads),
            temperature=temperature,
            columns=columns,
            out=torch.empty(count, 256, dtype=torch.bfloat16),
        )
        assert _error(got, gradient[:, columns]) < 4e-3


def test_of_equally_likely_words_the_first_is_the_likeliest(interpreted):
    hidden, weight = torch.ones(5, 64).bfloat16(), torch.zeros(600, 64).bfloat16()
    weight[[3, 9, 270, 599], 0] = 1  # two in one tile, and one in each of two others
    labels = torch.tensor([3, 9, 270, 599, 0])
    module = "model.ops.linear_logprob.triton"
    *_, correct = interpreted(module, "forward", hidden, weight, labels, temperature=1.0)
    assert correct.tolist() == [True, False, False, False, False]
    *_, none = interpreted(module, "forward", hidden, -weight, labels, temperature=1.0)
    assert none.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("kind", ["main", "index", "window"])
def test_pack_keys(interpreted, kind):
    torch.manual_seed(0)
    module = "model.ops.pack_keys.triton"
    plain = torch.randn(9, D).bfloat16() * torch.exp2(torch.randint(-12, 8, (9, 1)).float()).bfloat16()
    plain[0] = 0
    plain[1, :8] = torch.tensor([6.0, 0.25, -0.25, 0.75, 5.0, -0.0, 2.5, 3.5])
    arguments = (kind, plain, None, 1, torch.arange(9).int(), None, 1e-6, None)
    for got, expected in zip(
        interpreted(module, "pack_keys", *arguments), packing.pack_keys(*arguments), strict=True
    ):
        assert torch.equal(got, expected)

    angle = torch.rand(4, 8) * 6
    starts = torch.tensor([0, 2, 5, 7]).int()
    arguments = (
        kind,
        torch.randn(9, D),
        torch.randn(9, D),
        2,
        starts,
        torch.rand(D),
        1e-6,
        (angle.cos(), angle.sin()),
    )
    latent, records = interpreted(module, "pack_keys", *arguments)
    expected_latent, expected_records = packing.pack_keys(*arguments)
    torch.testing.assert_close(latent, expected_latent)
    assert _error(unpack(kind, records), unpack(kind, expected_records)) < 1e-2


def test_unpack_keys(interpreted):
    records = pack("main", torch.randn(5, D))
    got = interpreted("model.ops.unpack_keys.triton", "unpack_keys", records)
    assert torch.equal(got.float(), unpack("main", records))


def test_hyper_boundary(interpreted):
    torch.manual_seed(0)
    count, width = 5, 32
    streams, branch = torch.randn(count, 4, width).bfloat16(), torch.randn(count, width).bfloat16()
    projection, base, scale = torch.randn(24, 4 * width) * 0.1, torch.randn(24), torch.rand(3)
    k = boundary.coefficients(streams, projection, base, scale)
    arguments = (streams, branch, k, projection, base, scale, torch.rand(width))
    got = interpreted("model.ops.hyper_boundary.triton", "hyper_boundary", *arguments, eps=1e-6)
    expected = boundary.hyper_boundary(*arguments, eps=1e-6)
    assert _error(got[0], expected[0]) < 1e-3
    assert _error(got[1], expected[1]) < 1e-3
    torch.testing.assert_close(got[2], expected[2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("size", "candidates", "dense"), [(8, 5, 1), (3, 9, 100), (8, 19, 1)])
def test_candidates(interpreted, size, candidates, dense):
    torch.manual_seed(0)
    query, keys, weights = (
        torch.randn(5, 32, 32).bfloat16(),
        torch.randn(150, 32).bfloat16(),
        torch.randn(5, 32),
    )
    visible, scores = torch.tensor([0, 1, 60, 149, 150]).int(), torch.randn(5, 150)
    scores[2, 7] = float("nan")
    got = interpreted("model.ops.candidates.triton", "block_maxima", scores, visible, size)
    assert torch.equal(got, candidate.block_maxima(scores, visible, size))
    blocks = torch.stack([torch.randperm(-(-150 // size))[:candidates].sort().values for _ in visible]).int()
    if candidates < 19:
        blocks[1, 3:] = -1
    given = {"visible": visible, "blocks": blocks, "size": size}
    got = interpreted(
        "model.ops.candidates.triton", "topk_in_blocks", query, keys, weights, 16, **given, dense=dense
    )
    assert torch.equal(got, candidate.topk_in_blocks(query, keys, weights, 16, **given))
