"""Small odd inputs that launch every kernel of `model/ops`, for NVIDIA's checkers of memory and races.

Shapes are the smallest that reach each kernel and each of its branches by shape; results are not looked at.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import kernel_data as data
from benchmarks.kernel_data import SCALE
from model.ops import experts
from model.ops.candidates import best_blocks, topk_in_blocks
from model.ops.decode_rows import decode_rows
from model.ops.engram_gate import engram_gate
from model.ops.exact_linear import exact_linear
from model.ops.experts.triton import plan as planned
from model.ops.hyper_boundary import hyper_boundary, hyper_coefficients, hyper_input, hyper_update
from model.ops.index_decode import decode_scores
from model.ops.index_loss import index_loss
from model.ops.indexer import index_scores, index_topk
from model.ops.latents import latent_norm, latents
from model.ops.linear_logprob import linear_logprob
from model.ops.linear_reverse_kl import linear_reverse_kl
from model.ops.pack_keys import pack_keys
from model.ops.packed_experts import Stack, packed_experts
from model.ops.packed_experts.triton import unpack
from model.ops.records import pack
from model.ops.rotary import index_heads, rotary, window_keys
from model.ops.row_sums import row_sums
from model.ops.sampling import Rules, draw, sampling
from model.ops.sparse_attention import attention_site, sparse_attention
from model.ops.sparse_decode import sparse_decode
from model.ops.topk import topk
from model.ops.unpack_keys import unpack_keys
from model.ops.verification import verification
from model.ops.window_rows import window_rows


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return data.normal(*shape, dtype=dtype).requires_grad_()


def _back(*outputs: Tensor) -> None:
    leaving = [x for x in outputs if x.requires_grad]
    torch.autograd.backward(leaving, [torch.rand_like(x) for x in leaving])


def _angles(count: int, width: int = 64) -> tuple[Tensor, Tensor]:
    angle = torch.rand(count, width // 2, device="cuda")
    return angle.cos(), angle.sin()


def attention(heads: int, exact: bool, chosen: int = 64) -> None:
    """Forward of one form and the backward pass."""
    x = data.attention(21, 301, heads=heads, topk=chosen)
    leaves = [t.requires_grad_() for t in (x.query, x.entries, x.window, x.sink)]
    out, _ = sparse_attention(*leaves[:2], x.indices, leaves[2], x.first, leaves[3], scale=SCALE, exact=exact)
    _back(out)


def site(exact: bool) -> None:
    """Attention between its rotations, with the projection of its heads, both ways."""
    x = data.attention(21, 301, topk=128)
    leaves = [t.requires_grad_() for t in (x.entries, x.window, x.sink, data.normal(8, 64, 64 * 512 // 8))]
    entries, window, sink, weight = leaves
    query = x.query.requires_grad_().clone()
    where = query, entries, x.indices, window, x.first, sink, _angles(21), weight
    _back(attention_site(*where, scale=SCALE, exact=exact)[0])


def decode(batch: int, exact: bool, heads: int = 64) -> None:
    """Decoding from records, with the rotation inside and without."""
    x = data.decode(batch, 300, data.main_records(batch * 300))
    query, sink = x.query[:, :heads].contiguous(), x.sink[:heads].contiguous()
    where = query, x.records, x.indices, x.window, x.window_indices, sink
    for rope in (None, _angles(batch)):
        sparse_decode(*where, scale=SCALE, exact=exact, rope=rope)


def decode_inputs() -> None:
    """Latents and window keys of decoded tokens, the norm's gradient, and the rows of their windows."""
    values, window, norm, window_norm = _random(5, 192), data.normal(5, 512), _random(192), _random(512)
    _back(latent_norm(values, norm, 1e-6))
    with torch.no_grad():
        latents(values, norm, window, window_norm, _angles(5), eps=1e-6, rounded=True)
    slots, positions = torch.tensor([[2, 0, 1], [5, 300, 0]], device="cuda")
    floors = torch.tensor([[0, 200, 0], [3, 290, 0]], device="cuda")
    window_rows(slots, positions, floors, entries=131, window=128)


def choices() -> None:
    """Index scores in both widths, and the top-k with few and many rows."""
    begins = torch.zeros(9, dtype=torch.int32, device="cuda")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        query, keys = data.mxfp4_values(9, 32, 128).to(dtype), data.mxfp4_values(301, 128).to(dtype)
        weights, ends = torch.randn(9, 32, device="cuda"), begins + 301
        index_topk(query, keys, weights, 64, begins=begins, ends=ends)
        index_scores(query, keys, weights, begins=begins, ends=ends)
    for rows, width in ((3, 5001), (3, 20001), (257, 301)):
        scores = torch.randn(rows, width, device="cuda")
        scores[1] = 0
        topk(scores, 17)
        topk(scores, 64, ends=torch.randint(0, width, (rows,), device="cuda").int())


def chosen_blocks() -> None:
    """Blocks of candidates of few and of many queries, and the choice among their keys."""
    for count in (9, 257):
        query, keys = data.normal(count, 32, 128), data.normal(301, 128)
        weights = torch.randn(count, 32, device="cuda")
        visible = (torch.arange(count, device="cuda").int() * 7 + 1).clamp_max(301)
        blocks = best_blocks(torch.randn(count, 301, device="cuda"), visible, 12, 8)
        topk_in_blocks(query, keys, weights, 32, visible=visible, blocks=blocks, size=8)


def index_decoding() -> None:
    """Scores from records on pages, with listed blocks and without, and rows of what was chosen."""
    query, weights = data.normal(3, 32, 128), torch.randn(3, 32, device="cuda")
    records = pack("index", torch.randn(40 * 64, 128, device="cuda"))
    table = torch.randperm(39, device="cuda").view(3, 13)
    ends = torch.tensor([17, 300, 0], dtype=torch.int32, device="cuda")
    blocks = torch.tensor([[0, 2, -1], [1, 30, 37], [-1, -1, -1]], dtype=torch.int32, device="cuda")
    chosen = torch.tensor([[0, 5, 16, -1], [2, 3, 20, 21], [-1] * 4], dtype=torch.int32, device="cuda")
    for listed, width in ((None, 301), (blocks, 24)):
        decode_scores(query, weights, records, table, ends, width=width, page_groups=64, blocks=listed)
        decode_rows(chosen, table, ends, page_groups=64)


def head() -> None:
    """Log-probabilities and reverse KL of few tokens, both ways."""
    hidden, weight, labels = _random(5, 64), _random(301, 64), torch.randint(0, 301, (5,), device="cuda")
    _back(*linear_logprob(hidden, weight, labels))
    _back(linear_reverse_kl(hidden, weight, data.normal(5, 128), data.normal(301, 128)))


def packing() -> None:
    """Records of all kinds, pooled and not, and back."""
    for kind, width, ratio in (("main", 512, 2), ("index", 128, 1), ("window", 512, 1)):
        values = torch.randn(7 * ratio + 1, width, device="cuda")
        starts = torch.arange(7, device="cuda", dtype=torch.int32) * ratio + 1
        gates = torch.randn_like(values) if ratio > 1 else None
        norm = torch.rand(width, device="cuda")
        _, records = pack_keys(
            kind, values, gates=gates, ratio=ratio, starts=starts, norm=norm, rope=_angles(7)
        )
        if kind == "main":
            unpack_keys(records)


def positions() -> None:
    """Rotation, window keys with and without records, index heads, and their gradients."""
    angles, x, values = _angles(5), _random(5, 3, 128), _random(5, 512)
    norm = _random(512)
    _back(rotary(x, *angles), index_heads(x, *angles, rounded=True))
    _back(window_keys(values, norm, *angles, eps=1e-6, rounded=True))
    target = torch.tensor([3, -1, 0, 6, 2], device="cuda")
    ring = torch.zeros(7, 528, dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        window_keys(values, norm, *angles, eps=1e-6, rounded=True, ring=ring, target=target)


def boundary() -> None:
    """Sites of hyper-connections, in one call and by steps, both ways."""
    width = 320
    streams, branch, norm = _random(5, 4, width), _random(5, width), _random(width)
    projection = (torch.randn(24, 4 * width, device="cuda") * 0.05).requires_grad_()
    base, scale = torch.randn(24, device="cuda"), torch.rand(3, device="cuda")
    k = torch.rand(5, 24, device="cuda").requires_grad_()
    with torch.no_grad():
        hyper_boundary(streams, branch, k, projection, base, scale, norm)
    normed, squares = hyper_input(streams, k, norm, eps=1e-6)
    updated, following, _ = hyper_update(streams, branch, k, norm, eps=1e-6)
    leaves = base.requires_grad_(), scale.requires_grad_()
    _back(normed, updated, following, *hyper_coefficients(streams, squares, projection, *leaves))
    many = data.normal(17000, 4, 64)  # for tiles of 128 rows
    with torch.no_grad():
        hyper_coefficients(
            many, many.float().square().sum((1, 2)), torch.randn(24, 256, device="cuda"), base, scale
        )


def mixture() -> None:
    """Tokens through their experts by steps, and few of them in one go."""
    x, router, bias = _random(21, 256), data.normal(6, 256, scale=0.1), torch.zeros(6, device="cuda")
    w13, w2 = _random(7, 512, 256), _random(7, 256, 256)
    affinity, ids, weights, loads = experts.route(x, router, bias, chosen=2, factor=1.5)
    plan = experts.plan_of(ids, 6, 1, loads)
    active = experts.activated(x, w13, weights, plan, limit=10.0)
    _back(experts.combine(experts.grouped(active, w2, plan), plan), affinity)
    experts.plan_of(torch.randint(0, 300, (40, 6), device="cuda"), 300, 1)
    scanned = planned(ids, loads, 1, scan_above=0)
    assert torch.equal(scanned.place, plan.place)
    with torch.no_grad():
        experts.grouped(active[:, :48].contiguous(), w2[:, :, :48].contiguous(), plan)
        assert experts.few_rows(x, w13, w2, weights, plan, limit=10.0) is not None


def packed_mixture() -> None:
    """The same from FP4, for few tokens, in exact mode and unpacked."""

    def stack(rows: int, columns: int) -> Stack:
        codes = torch.randint(0, 256, (6, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(118, 124, (6, rows, columns // 32), dtype=torch.uint8, device="cuda")
        return Stack(codes, scales, data.normal(1, rows, columns))

    ids = torch.rand(21, 6, device="cuda").argsort(1)[:, :2]
    w13, w2, weights = stack(256, 256), stack(256, 128), torch.rand(21, 2, device="cuda")
    for exact in (False, True):
        plan = experts.plan_of(ids, 6, 1)
        packed_experts(data.normal(21, 256), w13, w2, weights, plan, limit=10.0, exact=exact)
    unpack(w2.codes, w2.scales)


def exact_products() -> None:
    """Exact products of few rows and of many, and by groups."""
    for rows in (5, 301):
        exact_linear(data.normal(rows, 256), data.normal(80, 256))
    exact_linear(data.normal(2, 5, 256), data.normal(2, 80, 256))


def learned_choices(heads: int) -> None:
    """The indexer's loss and its gradients."""
    x = data.attention(9, 301, heads=64, topk=64)
    student = _random(9, heads, 128), _random(9, heads, dtype=torch.float32), _random(301, 128)
    lse = torch.randn(9, 64, device="cuda") + 3
    _back(index_loss(*student, x.query, x.entries, lse, x.indices, scale=SCALE))


def memory() -> None:
    """The n-gram memory's gate with and without tokens that take nothing, and its table's gradient."""
    leaves = _random(5, 4, 320), _random(5, 5 * 320), _random(4, 320), _random(4, 320)
    for text in (None, torch.tensor([True, False, True, True, False], device="cuda")):
        _back(engram_gate(*leaves, text, eps=1e-6))
    row_sums(data.normal(301, 100), torch.randint(0, 40, (301,), device="cuda"))


def drawing(size: int) -> None:
    """Tokens of rows with every kind of rule."""
    rules = [
        (0.7, 1.0, 5),
        (1.0, 0.9, 0),
        (1.3, 0.8, 50),
        (0.0, 1.0, 0),
        (1.0, 1.0, 0),
        (1.0, 0.999, size - 1),
    ]
    temperature, top_p, top_k = (torch.tensor(column) for column in zip(*rules, strict=True))
    logits = torch.randn(len(rules), size, device="cuda") * 3
    logits[5] = 0
    seeds = torch.arange(len(rules))
    sampling(logits, Rules(temperature.double(), top_p.double(), top_k.long(), seeds, seeds))
    draw(logits, seeds.numpy().astype(np.uint64), seeds.numpy())


def speculation() -> None:
    """Acceptance of drafts for three requests."""
    slots, size = 2, 5001
    target, proposed = torch.randn(9, size, device="cuda"), torch.randn(slots, 3, size, device="cuda")
    index = torch.arange(9, device="cuda").view(3, 3)
    drafts = torch.randint(0, size, (3, slots), device="cuda")
    draws = torch.rand(3, slots, device="cuda", dtype=torch.float64)
    verification(target, proposed, index, drafts, torch.tensor([2, 0, 1], device="cuda"), draws, draws[:, 0])


@triton.jit
def _beyond(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1.0)


def beyond() -> None:
    """Write past the end of a tensor, which memcheck must report."""
    _beyond[(1,)](torch.empty(1000, device="cuda"), BLOCK=4096)


CASES: dict[str, Callable[[], None]] = {
    "attention": partial(attention, 64, False, 128),
    "attention_plain": partial(attention, 64, False),
    "site": partial(site, False),
    "site_exact": partial(site, True),
    "attention_exact": partial(attention, 64, True),
    "attention_few_heads": partial(attention, 16, False),
    "decode_few": partial(decode, 3, False),
    "decode_many": partial(decode, 33, False),
    "decode_exact": partial(decode, 3, True),
    "decode_few_heads": partial(decode, 3, False, 16),
    "decode_inputs": decode_inputs,
    "choices": choices,
    "candidates": chosen_blocks,
    "index_decode": index_decoding,
    "head": head,
    "packing": packing,
    "positions": positions,
    "boundary": boundary,
    "experts": mixture,
    "packed_experts": packed_mixture,
    "exact_linear": exact_products,
    "index_loss": partial(learned_choices, 32),
    "index_loss_few_heads": partial(learned_choices, 8),
    "memory": memory,
    "sampling": partial(drawing, 5001),
    "verification": speculation,
    "beyond": beyond,
}
