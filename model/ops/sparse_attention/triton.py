"""Forward of sparse attention: one program per query token and 64 heads, online softmax over gathered tiles.

At head width 512 the accumulator of 64 rows fills the registers of two warpgroups, so there is one query a
program and no room for a second; see `model.ops.tile.branched_dot` for the layout.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.tile import LAYOUT_FLAG, LN2, LOG2E, MASKED, UNFUSED, branched_dot, operand, round_bf16


@triton.jit(do_not_specialize=["entries"])
def _joint_rows(
    indices,
    first,
    last,
    rows,
    counts,
    entries,
    KEYS: tl.constexpr,
    MAIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    chosen = tl.load(indices + token * KEYS + column, mask=column < KEYS, other=-1)
    own = tl.load(last + token)
    oldest = tl.maximum(tl.load(first + token), own - (WINDOW - 1))
    recent = oldest + (column - MAIN)
    recent = tl.where(recent <= own, entries + recent, -1)
    tl.store(rows + token * COLUMNS + column, tl.where(column < MAIN, chosen, recent), mask=column < COLUMNS)
    tl.store(counts + token * 2, tl.sum((chosen >= 0).to(tl.int32), 0))
    tl.store(counts + token * 2 + 1, own - oldest + 1)


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Rows of the joint table (entries, then window) for each query: [T, total] int32, -1 for none.

    The first `main` columns are the selected entries, padded to whole tiles of `block`; the window follows,
    oldest first. `counts` [T, 2] says how many of each part are set, which stand first in it.
    """

    rows: Tensor
    counts: Tensor
    main: int
    block: int


def joint_rows(
    indices: Tensor, first: Tensor, last: Tensor, *, entries: int, window_size: int, width: int
) -> KeyRows:
    """Lay out what each query attends to. A kernel that works it out inside its loop is 4 % slower."""
    block = 64 if width >= 64 else 16
    count, keys = indices.shape
    main = triton.cdiv(keys, block) * block
    total = main + triton.cdiv(window_size, block) * block
    rows = torch.empty((count, total), dtype=torch.int32, device=indices.device)
    counts = torch.empty((count, 2), dtype=torch.int32, device=indices.device)
    _joint_rows[(count,)](
        indices,
        first,
        last,
        rows,
        counts,
        entries,
        KEYS=keys,
        MAIN=main,
        COLUMNS=total,
        WINDOW=window_size,
        BLOCK=triton.next_power_of_2(total),
        num_warps=4,
    )
    return KeyRows(rows, counts, main, block)


@dataclass(frozen=True, slots=True)
class Kept:
    """Probabilities [T, H, columns] bf16 as a forward formed them, and the maxima that they refer to.

    The softmax is not finished when a tile is done: `tops` fp32, in units of a score before its scale, say by
    what its probabilities are still to be multiplied; [T, n, H], one for each tile or pair of tiles.
    """

    weights: Tensor
    tops: Tensor

    @staticmethod
    def empty(query: Tensor, keys: KeyRows, tiles: int) -> "Kept":
        """Room for those of queries [T, H, D], with a maximum for so many `tiles` of keys."""
        (count, heads, _), columns = query.shape, keys.rows.shape[1]
        maxima = columns // (tiles * keys.block)
        tops = torch.empty((count, maxima, heads), dtype=torch.float32, device=query.device)
        return Kept(query.new_empty((count, heads, columns)), tops)


@triton.jit
def _forward(
    query,
    table,
    rows,
    counts,
    sink,
    out,
    lse,
    kept,
    tops,
    softmax_scale,
    flag,
    MAIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BRANCHED: tl.constexpr,
    KEEP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, D)
    if HEADS % BLOCK_H:
        # Further rows of the tile repeat the last head and write the same once more.
        h = tl.minimum(h, HEADS - 1)
    tile = token * HEADS * D + h[:, None] * D + d[None, :]
    q = operand(tl.load(query + tile))
    chosen = tl.load(counts + token * 2)
    recent = MAIN + tl.load(counts + token * 2 + 1)
    scale = softmax_scale * LOG2E
    acc = tl.zeros((BLOCK_H, D), tl.float32)
    top = tl.load(sink + h) * (1.0 / softmax_scale)
    total = tl.full((BLOCK_H,), 1.0, tl.float32)
    for n in tl.range(0, COLUMNS, BLOCK):
        column = n + tl.arange(0, BLOCK)
        i = tl.load(rows + token * COLUMNS + column)
        kv = operand(tl.load(table + tl.maximum(i, 0)[:, None] * D + d[None, :]))
        if BRANCHED:  # noqa: SIM108
            s = branched_dot(q, tl.trans(kv), flag)
        else:
            s = tl.dot(q, tl.trans(kv))
        s = tl.where((column < tl.where(n < MAIN, chosen, recent))[None, :], s, MASKED)
        raised = tl.maximum(top, tl.max(s, 1))
        decay = tl.exp2((top - raised) * scale)
        top = raised
        p = tl.exp2(tl.fma(s, scale, -(top * scale)[:, None]))
        total = tl.fma(total, decay, tl.sum(p, 1))
        weights = round_bf16(p)
        if KEEP:
            pair = (token * HEADS + h[:, None]) * COLUMNS + column[None, :]
            tl.store(kept + pair, weights.to(kept.dtype.element_ty))
            tl.store(tops + (token * (COLUMNS // BLOCK) + n // BLOCK) * HEADS + h, top)
        acc = tl.dot(weights, kv, acc * decay[:, None])
    tl.store(out + tile, round_bf16(acc * (1.0 / total)[:, None]).to(out.dtype.element_ty))
    tl.store(lse + token * HEADS + h, tl.fma(top, scale, tl.log2(total)) * LN2)


def forward(
    query: Tensor,
    table: Tensor,
    keys: KeyRows,
    sink: Tensor,
    *,
    scale: float,
    exact: bool = False,
    stages: int = 2,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [T, H] over `table` = entries followed by window rows.

    Into `kept` go the probabilities, with a maximum for each tile.
    """
    count, heads, channels = query.shape
    assert table.numel() < 2**31, (
        f"row offsets are 32 bits: {len(table)} rows of {channels} are too many for one call"
    )
    out = torch.empty_like(query)
    lse = torch.empty((count, heads), dtype=torch.float32, device=query.device)
    # In exact mode a whole tile for fewer heads too: with less the card multiplies by other instructions, by
    # which decoding would cut the sums otherwise.
    block_h = 64 if exact else min(heads, 64)
    _forward[(count, triton.cdiv(heads, block_h))](
        query,
        table,
        keys.rows,
        keys.counts,
        sink,
        out,
        lse,
        out if kept is None else kept.weights,
        lse if kept is None else kept.tops,
        scale,
        LAYOUT_FLAG,
        MAIN=keys.main,
        COLUMNS=keys.rows.shape[1],
        HEADS=heads,
        BLOCK_H=block_h,
        D=channels,
        BLOCK=keys.block,
        BRANCHED=not exact,
        KEEP=kept is not None,
        num_warps=8,
        num_stages=stages,
        **UNFUSED,
    )
    return out, lse
