"""Index scores of one query a sequence, straight from FP4 records on pages.

Keys stand on the rows of the product as in `model.ops.indexer`, in tiles of the same height and with the
same order of channels, so that both give a key the same score.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.tile import (
    KEY_SCALE,
    UNFUSED,
    e2m1_halves,
    operand,
    round_bf16,
    scale_groups,
    sum_of_heads,
    ue8m0_scale,
)

_KEYS = 64


@triton.jit
def _scores(
    query, weights, records, table, ends, blocks, out, width, pages, candidates, factor, HEADS: tl.constexpr,
    D: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = D // 2
    BYTES: tl.constexpr = D // 2 + D // 32
    d = tl.arange(0, HALF)
    h = tl.arange(0, HEADS)
    end = tl.load(ends + row)
    start = tl.program_id(0) * TILES * BLOCK
    q = query + row * HEADS * D + h[:, None] * D + d[None, :]
    q0 = operand(tl.load(q))
    q1 = operand(tl.load(q + HALF))
    w = tl.load(weights + row * HEADS + h).to(tl.float32) * factor
    if ROUNDED:
        w = round_bf16(w).to(tl.float32)
    for n in tl.range(start, tl.minimum(start + TILES * BLOCK, width), BLOCK):
        column = n + tl.arange(0, BLOCK)
        position = column
        seen = column < width
        if LISTED:
            block = tl.load(blocks + row * candidates + column // SIZE, mask=seen, other=-1)
            position = block * SIZE + column % SIZE
            seen = seen & (block >= 0)
        seen = seen & (position < end)
        if LISTED or n < end:
            # By way of a float, Triton forgets what it knows of the numbers: after `where` it takes each for
            # a multiple of what the first one is, and loads a record of 68 bytes 16 at a time.
            safe = tl.where(seen, position, 0).to(tl.float32).to(tl.int32)
            page = tl.load(table + row * pages + safe // GROUPS).to(tl.int64)
            record = records + (page * GROUPS + safe % GROUPS)[:, None] * BYTES
            low, high = e2m1_halves(tl.load(record + d[None, :]))
            g = tl.arange(0, HALF // 32)[None, :]
            s0 = ue8m0_scale(tl.load(record + HALF + g))
            s1 = ue8m0_scale(tl.load(record + HALF + HALF // 32 + g))
            dots = tl.dot(scale_groups(low, s0, BLOCK, HALF, 32), tl.trans(q0))
            dots = tl.dot(scale_groups(high, s1, BLOCK, HALF, 32), tl.trans(q1), dots)
            score = tl.reshape(sum_of_heads(dots * KEY_SCALE, w, BLOCK, 1, HEADS), (BLOCK,))
            score = tl.where(seen, score, float("-inf"))
        else:
            score = tl.full((BLOCK,), float("-inf"), tl.float32)
        tl.store(out + row * width + column, score, mask=column < width)


def decode_scores(
    query: Tensor,
    weights: Tensor,
    records: Tensor,
    table: Tensor,
    ends: Tensor,
    *,
    width: int,
    page_groups: int,
    blocks: Tensor | None,
    block_size: int,
    factor: float,
) -> Tensor:
    """See `model.ops.index_decode.decode_scores`."""
    rows, heads, channels = query.shape
    assert width <= 2**24, f"positions pass through float32: {width} columns are too many"
    out = torch.empty((rows, width), dtype=torch.float32, device=query.device)
    tiles = 2 if rows <= 8 else 8
    _scores[(triton.cdiv(width, _KEYS * tiles), rows)](
        query.contiguous(), weights.contiguous(), records, table.contiguous(), ends,
        ends if blocks is None else blocks.contiguous(), out, width, table.shape[1],
        0 if blocks is None else blocks.shape[1], factor, HEADS=heads, D=channels, GROUPS=page_groups,
        SIZE=block_size, LISTED=blocks is not None, BLOCK=_KEYS, TILES=tiles,
        ROUNDED=weights.dtype is torch.bfloat16, num_warps=4, **UNFUSED,
    )  # fmt: skip
    return out
