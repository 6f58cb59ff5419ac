"""Index scores with the keys on the rows of the product, so that the sum over heads stays inside a thread."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.indexer import queries_at_once
from model.ops.tile import UNFUSED, operand, sum_of_heads
from model.ops.topk.triton import rows_of_scores, topk

_KEYS = 64
_TILES = 32


@triton.jit
def _tile(
    q,
    w,
    keys,
    scores,
    t,
    start,
    count,
    width,
    stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    n = start + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    target = scores + t.to(tl.int64)[None, :] * stride + n[:, None]
    if WHOLE:
        k = operand(tl.load(keys + n[:, None] * D + d[None, :]))
    else:
        k = operand(tl.load(keys + n[:, None] * D + d[None, :], mask=(n < width)[:, None], other=0.0))
    total = sum_of_heads(tl.dot(k, tl.trans(q)), w, BLOCK, QUERIES, HEADS)
    if WHOLE:
        tl.store(target, total)
    else:
        tl.store(target, total, mask=(t < count)[None, :] & (n < width)[:, None])


@triton.jit(do_not_specialize=["count", "width"])
def _scores(
    query,
    keys,
    weights,
    begins,
    ends,
    scores,
    count,
    width,
    stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    t = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    r = tl.program_id(1) * QUERIES * HEADS + tl.arange(0, QUERIES * HEADS)
    d = tl.arange(0, D)
    if WHOLE:
        q = operand(tl.load(query + r[:, None] * D + d[None, :]))
        w = tl.load(weights + r)
    else:
        q = operand(
            tl.load(query + r[:, None] * D + d[None, :], mask=(r < count * HEADS)[:, None], other=0.0)
        )
        w = tl.load(weights + r, mask=r < count * HEADS, other=0.0)
    start = tl.program_id(0) * TILES * BLOCK
    begin = tl.min(tl.load(begins + t, mask=t < count, other=width), 0) // BLOCK * BLOCK
    end = tl.max(tl.load(ends + t, mask=t < count, other=0), 0)
    whole = WHOLE and (begin <= start) & (start + TILES * BLOCK <= end)
    if whole:
        # A constant number of steps: 9 % faster than bounds known only at run time.
        for j in tl.range(0, TILES):
            _tile(
                q, w, keys, scores, t, start + j * BLOCK, count, width, stride, HEADS, D, QUERIES, BLOCK, True
            )  # fmt: skip
    else:
        for n in tl.range(
            tl.maximum(start, begin), tl.minimum(start + TILES * BLOCK, end), BLOCK, num_stages=1
        ):
            _tile(q, w, keys, scores, t, n, count, width, stride, HEADS, D, QUERIES, BLOCK, WHOLE)


def index_scores(
    query: Tensor, keys: Tensor, weights: Tensor, *, begins: Tensor, ends: Tensor, out: Tensor | None = None
) -> Tensor:
    """Scores [T, S] fp32; tiles that none of their queries sees are left unwritten."""
    assert keys.numel() < 2**31, f"row offsets are 32 bits: {len(keys)} keys are too many for one call"
    count, heads, channels = query.shape
    width = len(keys)
    out = rows_of_scores(count, width, query.device) if out is None else out
    assert out.stride(1) == 1
    queries = max(1, 128 // heads)
    grid = (triton.cdiv(width, _KEYS * _TILES), triton.cdiv(count, queries))
    _scores[grid](
        query,
        keys,
        weights,
        begins,
        ends,
        out,
        count,
        width,
        out.stride(0),
        HEADS=heads,
        D=channels,
        QUERIES=queries,
        BLOCK=_KEYS,
        TILES=_TILES,
        WHOLE=count % queries == 0 and width % _KEYS == 0,
        num_warps=4,
        # Tiles of bf16 in two stages leave room for three programs on a processor.
        num_stages=2 if query.element_size() == 2 else 3,
        **UNFUSED,
    )
    return out


def index_topk(
    query: Tensor, keys: Tensor, weights: Tensor, k: int, *, begins: Tensor, ends: Tensor
) -> Tensor:
    """See `model.ops.indexer.index_topk`."""
    query, keys, weights = query.contiguous(), keys.contiguous(), weights.contiguous()
    count = len(query)
    chosen = torch.empty((count, k), dtype=torch.int32, device=query.device)
    step = queries_at_once(len(keys))
    buffer = rows_of_scores(min(count, step), len(keys), query.device)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        b, e = begins[part], ends[part]
        scores = buffer[: part.stop - start]
        index_scores(query[part], keys, weights[part], begins=b, ends=e, out=scores)
        chosen[part] = topk(scores, k, begins=b, ends=e)
    return chosen
