"""Forward of sparse attention: one program per query token and 64 heads, online softmax over gathered tiles.

At head width 512 the accumulator of 64 rows fills the registers of two warpgroups, so there is one query a program and
no room for a second; see `model.ops.tile.branched_dot` for the layout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.tile import LAYOUT_FLAG, LN2, LOG2E, MASKED, branched_dot, operand, round_bf16


@triton.jit
def key_rows(indices, first, last, entries, token, column, KEYS: tl.constexpr, MAIN: tl.constexpr, WINDOW: tl.constexpr):
    """Rows of the joint table for key columns: MAIN >= KEYS columns of selected entries, then the window; -1 for none."""
    chosen = tl.load(indices + token * KEYS + column, mask=column < KEYS, other=-1)
    recent = last - (WINDOW - 1) + (column - MAIN)
    recent = tl.where((recent >= first) & (recent <= last), entries + recent, -1)
    return tl.where(column < MAIN, chosen, recent)


@triton.jit
def _forward(
    query,
    table,
    indices,
    first,
    last,
    sink,
    out,
    lse,
    softmax_scale,
    entries,
    flag,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BRANCHED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, D)
    tile = token * HEADS * D + h[:, None] * D + d[None, :]
    q = operand(tl.load(query + tile))
    first_row = tl.load(first + token)
    last_row = tl.load(last + token)
    scale = softmax_scale * LOG2E
    acc = tl.zeros((BLOCK_H, D), tl.float32)
    top = tl.load(sink + h) * (1.0 / softmax_scale)
    total = tl.full((BLOCK_H,), 1.0, tl.float32)
    MAIN: tl.constexpr = (KEYS + BLOCK - 1) // BLOCK * BLOCK
    for n in tl.range(0, MAIN + WINDOW, BLOCK):
        i = key_rows(indices, first_row, last_row, entries, token, n + tl.arange(0, BLOCK), KEYS, MAIN, WINDOW)
        kv = operand(tl.load(table + tl.maximum(i, 0)[:, None] * D + d[None, :]))
        if BRANCHED:
            s = branched_dot(q, tl.trans(kv), flag)
        else:
            s = tl.dot(q, tl.trans(kv))
        s = tl.where((i >= 0)[None, :], s, MASKED)
        raised = tl.maximum(top, tl.max(s, 1))
        decay = tl.exp2((top - raised) * scale)
        top = raised
        p = tl.exp2(s * scale - (top * scale)[:, None])
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(round_bf16(p), kv, acc * decay[:, None])
    tl.store(out + tile, round_bf16(acc * (1.0 / total)[:, None]).to(out.dtype.element_ty))
    tl.store(lse + token * HEADS + h, (top * scale + tl.log2(total)) * LN2)


def key_block(channels: int) -> int:
    """Keys a step: 64 fills the tensor cores and just fits shared memory at 512 channels."""
    return 64 if channels >= 64 else 16


def forward(
    query: Tensor,
    table: Tensor,
    indices: Tensor,
    first: Tensor,
    last: Tensor,
    sink: Tensor,
    *,
    scale: float,
    window_size: int,
    entries: int,
    exact: bool = False,
    block: int | None = None,
    stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [T, H] over `table` = entries followed by window rows."""
    count, heads, channels = query.shape
    assert table.numel() < 2**31, f"row offsets are 32 bits: {len(table)} rows of {channels} are too many for one call"
    out = torch.empty_like(query)
    lse = query.new_empty((count, heads), dtype=torch.float32)
    block_h = min(heads, 64)
    _forward[(count, heads // block_h)](
        query,
        table,
        indices,
        first,
        last,
        sink,
        out,
        lse,
        scale,
        entries,
        LAYOUT_FLAG,
        KEYS=indices.shape[1],
        WINDOW=window_size,
        HEADS=heads,
        BLOCK_H=block_h,
        D=channels,
        BLOCK=block or key_block(channels),
        BRANCHED=not exact,
        num_warps=8,
        num_stages=stages,
    )
    return out, lse
