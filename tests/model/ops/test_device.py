"""The kernels on a card: against fp64 definitions, at odd sizes, on poisoned memory, and repeated."""

import pytest
import torch

from benchmarks import kernel_data as data
from benchmarks.kernel_data import SCALE, WIDTH, WINDOW
from benchmarks.kernel_timing import error
from model.layers.exact import exact_mode
from model.layers.linear import wide_linear
from model.ops.dispatch import paths, reference_only
from model.ops.hyper_boundary import hyper_boundary
from model.ops.hyper_boundary import reference as boundary
from model.ops.indexer import index_topk
from model.ops.linear_logprob import linear_logprob
from model.ops.pack_keys import pack_keys
from model.ops.records import pack, unpack
from model.ops.rotary import rotary
from model.ops.sampling import Rules, sampling
from model.ops.sparse_attention import reference as attention
from model.ops.sparse_attention import sparse_attention
from model.ops.sparse_decode import sparse_decode
from model.ops.topk import topk
from model.ops.unpack_keys import unpack_keys

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize(
    ("count", "heads", "topk_size"), [(301, 64, 512), (37, 64, 100), (64, 128, 64), (50, 16, 0)]
)
@pytest.mark.parametrize("kind", ["random", "drift"])
def test_attention_and_every_gradient(count, heads, topk_size, kind):
    x = data.attention(count, 700, kind, heads=heads, topk=topk_size)
    leaves = [t.clone().requires_grad_() for t in (x.query, x.entries, x.window, x.sink)]
    last = torch.arange(count, dtype=torch.int32, device="cuda")

    def run():
        out, lse = sparse_attention(
            leaves[0], leaves[1], x.indices, leaves[2], x.first, leaves[3], scale=SCALE
        )
        return out.detach(), lse, torch.autograd.grad(out, leaves, x.grad)

    out, lse, gradients = run()
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected, expected_lse = attention.forward(
        wide[0], wide[1], x.indices, wide[2], x.first, last, wide[3], scale=SCALE, window_size=WINDOW
    )
    assert error(out, expected) < 3e-3
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)
    for got, right in zip(gradients, torch.autograd.grad(expected, wide, x.grad.double()), strict=True):
        if right.norm() > 0:
            assert error(got, right) < 5e-3
    for _ in range(4):
        again = run()
        assert torch.equal(again[0], out)
        assert all(torch.equal(a, b) for a, b in zip(again[2], gradients, strict=True))
    assert paths()["sparse_attention"] == "triton"


def test_gradients_do_not_depend_on_where_a_chunk_of_queries_ends():
    from model.ops.sparse_attention import invert

    x = data.attention(300, 500)
    leaves = [t.clone().requires_grad_() for t in (x.query, x.entries, x.window, x.sink)]
    results = []
    for chunk in (300, 77):
        out, _ = sparse_attention(
            leaves[0],
            leaves[1],
            x.indices,
            leaves[2],
            x.first,
            leaves[3],
            scale=SCALE,
            inverse=invert(x.indices, 500, chunk),
        )
        results.append(torch.autograd.grad(out, leaves, x.grad))
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 4e-3


@pytest.mark.parametrize("batch", [1, 7, 33, 64])
@pytest.mark.parametrize(("exact", "heads"), [(False, 64), (True, 64), (False, 32), (True, 32)])
@pytest.mark.parametrize("turned", [False, True])
def test_decode(batch, exact, heads, turned):
    records = data.main_records(batch * 900)
    x = data.decode(batch, 900, records)
    # Rows of padding, whole tiles of it, and a row without main keys.
    x.indices[0, 70:], x.indices[batch // 2, 400:], x.window_indices[-1, 65:] = -1, -1, -1
    x.indices[batch // 3] = -1
    arguments = (x.query[:, :heads], records, x.indices, x.window, x.window_indices, x.sink[:heads])
    rope = (torch.randn(batch, 32, device="cuda").cos(), torch.randn(batch, 32, device="cuda").sin())
    options = {"scale": SCALE, "exact": exact, "rope": rope if turned else None}
    out = sparse_decode(*arguments, **options)
    counts = torch.stack([(x.indices >= 0).sum(1), (x.window_indices >= 0).sum(1)], 1).int()
    for _ in range(4):
        assert torch.equal(sparse_decode(*arguments, **options, counts=counts), out)
    with reference_only():
        expected = sparse_decode(arguments[0].float(), *arguments[1:], **options)
    assert error(out, expected) < 3e-3
    if exact and turned:
        apart = sparse_decode(rotary(arguments[0], *rope), *arguments[1:], scale=SCALE, exact=True)
        assert torch.equal(rotary(apart, *rope, inverse=True), out)


@pytest.mark.parametrize("heads", [64, 32, 16])
def test_exact_mode_gives_prefill_and_decode_the_same_bits_for_any_batch(heads):
    count = 64
    x = data.attention(count + 200, 3000)
    query, sink = x.query[:, :heads].contiguous(), x.sink[:heads].contiguous()
    records, recent = pack("main", x.entries), pack("window", x.window)
    entries, window = unpack_keys(records), unpack("window", recent).bfloat16()
    prefill, _ = sparse_attention(query, entries, x.indices, window, x.first, sink, scale=SCALE, exact=True)
    some = torch.arange(200, 200 + count, device="cuda", dtype=torch.int32)
    rows = attention.window_rows(x.first[some], some, WINDOW)
    rows = torch.where(rows >= 0, rows, 1 << 30).sort(1).values
    rows = torch.where(rows < 1 << 30, rows, -1).int()
    for batch in (1, 7, count):
        decoded = sparse_decode(
            query[some[:batch]],
            records,
            x.indices[some[:batch]],
            recent,
            rows[:batch],
            sink,
            scale=SCALE,
            exact=True,
        )
        assert torch.equal(decoded, prefill[some[:batch]])
    part = slice(100, 140)
    alone, _ = sparse_attention(
        query[part],
        entries,
        x.indices[part],
        window,
        x.first[part],
        sink,
        scale=SCALE,
        exact=True,
        last=torch.arange(100, 140, dtype=torch.int32, device="cuda"),
    )
    assert torch.equal(alone, prefill[part])


@pytest.mark.parametrize(("rows", "width"), [(3, 40), (64, 5001), (300, 12345), (2, 1 << 20)])
@pytest.mark.parametrize("k", [17, 512])
def test_topk(rows, width, k):
    scores = torch.randn(rows, width, device="cuda")
    scores[0] = 0
    scores[1] = torch.relu(scores[1] - 2)
    if rows > 4:
        scores[2] = torch.round(scores[2] * 4)
        scores[3, 9:] = float("-inf")
        scores[4, ::3] = float("nan")
        scores[4, 1] = float("inf")
    begins = torch.randint(0, width // 2, (rows,), device="cuda").int()
    ends = torch.randint(0, width + 1, (rows,), device="cuda").int()
    for ranges in ({}, {"begins": begins, "ends": ends}):
        got = topk(scores, k, **ranges)
        with reference_only():
            assert torch.equal(got, topk(scores, k, **ranges))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_indexer(dtype):
    count, keys_count = 1031, 5003
    query, keys = data.mxfp4_values(count, 32, 128).to(dtype), data.mxfp4_values(keys_count, 128).to(dtype)
    weights = torch.randn(count, 32, device="cuda")
    begins = torch.where(torch.arange(count, device="cuda") < 500, 0, 2000).int()
    ends = torch.minimum(begins + torch.arange(count, device="cuda") * 5, torch.tensor(keys_count)).int()
    got = index_topk(query, keys, weights, 512, begins=begins, ends=ends)
    assert torch.equal(got, index_topk(query, keys, weights, 512, begins=begins, ends=ends))
    row = slice(700, 703)
    alone = index_topk(query[row], keys, weights[row], 512, begins=begins[row], ends=ends[row])
    assert torch.equal(alone, got[row])
    with reference_only():
        expected = index_topk(query.float(), keys.float(), weights, 512, begins=begins, ends=ends)
    assert (got == expected).float().mean() > (0.999 if dtype == torch.bfloat16 else 0.97)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("count", "vocabulary", "width"), [(1, 1000, 64), (300, 5001, 256), (129, 64, 5120)])
def test_linear_logprob(count, vocabulary, width, exact):
    hidden = data.normal(count, width).requires_grad_()
    weight = data.normal(vocabulary, width, scale=2 * width**-0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (count,), device="cuda")
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    labels[::2] = (wide[0] @ wide[1].T).argmax(1)[::2]
    grads = torch.randn(count, device="cuda"), torch.randn(count, device="cuda")

    def run():
        got = linear_logprob(hidden, weight, labels, temperature=0.8, exact=exact)
        return got, torch.autograd.grad(got[:2], (hidden, weight), grads)

    got, gradients = run()
    assert paths()["linear_logprob"] == "triton"
    with reference_only():
        expected = linear_logprob(*wide, labels, temperature=0.8)
    for a, b in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-5)
    assert torch.equal(got[2], expected[2]) and got[2][::2].all()
    right = torch.autograd.grad(expected[:2], wide, [g.double() for g in grads])
    for a, b in zip(gradients, right, strict=True):
        assert error(a, b) < 8e-3
    logprob, entropy, correct = linear_logprob(hidden[:1], weight, labels[:1], temperature=0.8, exact=exact)
    assert torch.equal(logprob, got[0][:1]) and torch.equal(correct, got[2][:1])
    if not exact:  # whose entropies are sums of a library's
        assert torch.equal(entropy, got[1][:1])
    for _ in range(4):
        again = run()
        assert all(torch.equal(a, b) for a, b in zip(sum(again, ()), sum((got, gradients), ()), strict=True))


@pytest.mark.parametrize("exact", [False, True])
def test_of_equally_likely_words_the_first_is_the_likeliest(exact):
    hidden, weight = torch.ones(5, 64, device="cuda"), torch.zeros(600, 64, device="cuda")
    weight[[3, 9, 270, 599], 0] = 1  # two in one tile, and one in each of two others
    labels = torch.tensor([3, 9, 270, 599, 0], device="cuda")
    for sign, right in ((1, [True, False, False, False, False]), (-1, [False, False, False, False, True])):
        *_, correct = linear_logprob(hidden.bfloat16(), sign * weight.bfloat16(), labels, exact=exact)
        assert correct.tolist() == right


@pytest.mark.parametrize("vocabulary", [5001, 5002, 32770])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_log_probabilities_are_the_samplers(vocabulary, temperature):
    hidden, weight = data.normal(301, 256), data.normal(vocabulary, 256, scale=0.2)
    for first, last in ((0, 1), (7, 8), (40, 301)):
        count = last - first
        with exact_mode(True):
            logits = wide_linear(hidden[first:last], weight)
        numbers = torch.arange(count)
        same = torch.full((count,), temperature, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
        drawn = sampling(logits, Rules(*same, torch.zeros_like(numbers), numbers, numbers), exact=True)
        labels = torch.zeros(301, dtype=torch.int64)
        labels[first:last] = drawn.tokens
        trained, _, _ = linear_logprob(hidden, weight, labels.cuda(), temperature=temperature, exact=True)
        assert torch.equal(trained[first:last].cpu(), drawn.logprobs)


@pytest.mark.parametrize("kind", ["main", "index", "window"])
def test_pack_keys_agrees_on_every_bf16_value(kind):
    every = torch.arange(65536, device="cuda").to(torch.int16).view(torch.bfloat16)
    every = torch.where(every.isfinite() & (every.abs() < 1e30), every, 1.0)
    for keys in (every.view(-1, WIDTH), every[torch.randperm(65536, device="cuda")].view(-1, WIDTH)):
        _, records = pack_keys(kind, keys)
        assert torch.equal(records, pack(kind, keys))


@pytest.mark.parametrize(("kind", "width", "ratio"), [("main", 512, 2), ("main", 512, 1), ("index", 128, 1)])
def test_pack_keys_with_pooling_norm_and_rotation(kind, width, ratio):
    groups = 333
    values = torch.randn(groups * ratio + 1, width, device="cuda")
    gates = torch.randn_like(values) if ratio > 1 else None
    starts = torch.arange(groups, device="cuda", dtype=torch.int32) * ratio + 1
    angle = torch.rand(groups, 32, device="cuda") * 6
    options = {"norm": torch.rand(width, device="cuda"), "rope": (angle.cos(), angle.sin())}
    got = pack_keys(kind, values, gates=gates, ratio=ratio, starts=starts, **options)
    with reference_only():
        expected = pack_keys(kind, values, gates=gates, ratio=ratio, starts=starts, **options)
    assert (got[0] != expected[0]).float().mean() < 1e-3
    assert (got[1] != expected[1]).float().mean() < 1e-3
    if kind == "main":
        assert torch.equal(unpack_keys(got[1]).float(), unpack("main", got[1]))


@pytest.mark.parametrize(("count", "width"), [(1, 64), (77, 5120), (65, 1536), (16900, 1536)])
def test_hyper_boundary(count, width):
    streams, branch = data.normal(count, 4, width), data.normal(count, width)
    projection, base = torch.randn(24, 4 * width, device="cuda") * 0.02, torch.randn(24, device="cuda")
    scale, norm = torch.rand(3, device="cuda") + 0.5, torch.rand(width, device="cuda")
    k = boundary.coefficients(streams, projection, base, scale)
    arguments = (streams, branch, k, projection, base, scale, norm)
    got = hyper_boundary(*arguments)
    assert paths()["hyper_boundary"] == "triton"
    expected = boundary.hyper_boundary(*(x.double() for x in arguments), eps=1e-6)
    assert error(got[0], expected[0]) < 3e-3 and error(got[1], expected[1]) < 4e-3
    following = boundary.coefficients(got[0].double(), *(x.double() for x in (projection, base, scale)))
    torch.testing.assert_close(got[2], following.float(), atol=3e-4, rtol=0)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(hyper_boundary(*arguments), got, strict=True))
