"""Maxima of blocks of scores, and scores of the keys of chosen blocks alone.

Keys of chosen blocks stand on the rows of the product, with the order of channels and heads of
`model.ops.indexer` and `model.ops.index_decode`, so that all three give a key the same score.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.indexer.triton import index_scores
from model.ops.tile import UNFUSED, operand, sum_of_heads
from model.ops.topk.triton import rows_of_scores, topk

# With more keys than this many times the candidates, scores of these alone are faster than of all keys.
DENSE = 3
_KEYS = 128
_TILES = 16


@triton.jit(do_not_specialize=["count"])
def _maxima(
    scores, visible, out, stride, out_stride, count, SIZE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    end = tl.load(visible + row)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, PADDED)
    column = b[:, None] * SIZE + s[None, :]
    x = tl.load(
        scores + row * stride + column, mask=(s < SIZE)[None, :] & (column < end), other=float("-inf")
    )
    best = tl.max(tl.where(x > float("-inf"), x, float("-inf")), 1)
    newest = (b * SIZE < end) & (b * SIZE + SIZE >= end)
    tl.store(out + row * out_stride + b, tl.where(newest, float("inf"), best), mask=b < count)


def block_maxima(scores: Tensor, visible: Tensor, size: int) -> Tensor:
    """See `model.ops.candidates.reference.block_maxima`."""
    rows, width = scores.shape
    assert scores.stride(1) == 1, "scores must be contiguous along the row"
    count, padded = triton.cdiv(width, size), triton.next_power_of_2(size)
    out = rows_of_scores(rows, count, scores.device)
    block = min(max(1, 4096 // padded), triton.next_power_of_2(count))
    _maxima[(triton.cdiv(count, block), rows)](
        scores, visible, out, scores.stride(0), out.stride(0), count, SIZE=size, PADDED=padded, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["candidates", "width"])
def _listed_scores(
    query, keys, weights, ends, blocks, out, candidates, width, HEADS: tl.constexpr, D: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    h = tl.arange(0, HEADS)
    end = tl.load(ends + row)
    q = operand(tl.load(query + row * HEADS * D + h[:, None] * D + d[None, :]))
    w = tl.load(weights + row * HEADS + h)
    start = tl.program_id(0) * TILES * BLOCK
    for n in tl.range(start, tl.minimum(start + TILES * BLOCK, width), BLOCK, num_stages=2):
        c = n + tl.arange(0, BLOCK)
        block = tl.load(blocks + row * candidates + c // SIZE, mask=c < width, other=-1)
        key = block * SIZE + c % SIZE
        seen = (block >= 0) & (key < end)
        k = operand(tl.load(keys + tl.where(seen, key, 0)[:, None] * D + d[None, :]))
        score = tl.reshape(sum_of_heads(tl.dot(k, tl.trans(q)), w, BLOCK, 1, HEADS), (BLOCK,))
        tl.store(out + row * width + c, tl.where(seen, score, float("-inf")), mask=c < width)


def scores_of_blocks(
    query: Tensor, keys: Tensor, weights: Tensor, ends: Tensor, blocks: Tensor, size: int
) -> Tensor:
    """[T, C * size] fp32, minus infinity for keys that are not given or not seen."""
    assert keys.numel() < 2**31, f"row offsets are 32 bits: {len(keys)} keys are too many for one call"
    count, heads, channels = query.shape
    width = blocks.shape[1] * size
    out = torch.empty((count, width), dtype=torch.float32, device=query.device)
    _listed_scores[(triton.cdiv(width, _KEYS * _TILES), count)](
        query.contiguous(), keys.contiguous(), weights.contiguous(), ends, blocks.contiguous(), out,
        blocks.shape[1], width, HEADS=heads, D=channels, SIZE=size, BLOCK=_KEYS, TILES=_TILES,
        num_warps=4, **UNFUSED,
    )  # fmt: skip
    return out


def topk_in_blocks(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    k: int,
    *,
    visible: Tensor,
    blocks: Tensor,
    size: int,
    dense: float = DENSE,
) -> Tensor:
    """See `model.ops.candidates.topk_in_blocks`; the result does not depend on `dense`."""
    query, keys, weights, blocks = (x.contiguous() for x in (query, keys, weights, blocks))
    candidates = blocks.shape[1] * size
    if len(keys) > dense * candidates:
        scores = scores_of_blocks(query, keys, weights, visible, blocks, size)
        return topk(scores, k, blocks=blocks, block_size=size, packed=True)
    scores = index_scores(query, keys, weights, begins=torch.zeros_like(visible), ends=visible)
    if len(keys) <= candidates:
        return topk(scores, k, ends=visible)
    return topk(scores, k, ends=visible, blocks=blocks, block_size=size)
