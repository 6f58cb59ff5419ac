"""Backward of sparse attention, deterministic: three products per query, then gathered sums per key.

The first kernel recomputes the probabilities from the log-sum-exp, forms dQ, and keeps P and dS in bf16 for
a chunk of queries. Gradients of entries are written as one row per (query, entry) and summed per entry in
list order; gradients of window rows are formed key-major from the band of queries that see them. No atomics,
so equal inputs give equal bits.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.sparse_attention.gluon import supports
from model.ops.sparse_attention.gluon_backward import query_gradient
from model.ops.sparse_attention.gluon_rows import entry_rows
from model.ops.sparse_attention.inverse import CHUNK, InverseIndex, invert
from model.ops.sparse_attention.triton import Kept, KeyRows
from model.ops.tile import LAYOUT_FLAG, LOG2E, operand, round_bf16


@triton.jit
def _query_gradient(
    query,
    table,
    rows,
    counts,
    out,
    grad_out,
    lse,
    lost,
    grad_query,
    weights,
    grad_scores,
    delta,
    softmax_scale,
    flag,
    MAIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dQ, and P and dS [T, H, COLUMNS] of every (query, key) pair."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, D)
    tile = token * HEADS * D + h[:, None] * D + d[None, :]
    q = operand(tl.load(query + tile))
    do = operand(tl.load(grad_out + tile))
    log_total = tl.load(lse + token * HEADS + h) * LOG2E
    dot_out = tl.sum(tl.load(out + tile).to(tl.float32) * do.to(tl.float32), 1)
    dot_out += tl.load(lost + token * HEADS + h)
    tl.store(delta + token * HEADS + h, dot_out)
    chosen = tl.load(counts + token * 2)
    recent = MAIN + tl.load(counts + token * 2 + 1)
    scale = softmax_scale * LOG2E
    dq = tl.zeros((BLOCK_H, D), tl.float32)
    # Tiles of which nothing is selected are left out; what would stand for them is never read.
    used = tl.cdiv(chosen, BLOCK)
    for tile_number in tl.range(0, used + (COLUMNS - MAIN) // BLOCK):
        n = tl.where(tile_number < used, 0, MAIN - used * BLOCK) + tile_number * BLOCK
        column = n + tl.arange(0, BLOCK)
        i = tl.load(rows + token * COLUMNS + column)
        kv = operand(tl.load(table + tl.maximum(i, 0)[:, None] * D + d[None, :]))
        if flag > 0:
            s = tl.dot(q, tl.trans(kv))
            dp = tl.dot(do, tl.trans(kv))
        else:
            s = tl.dot(q, tl.trans(kv)) * 2.0
            dp = tl.dot(do, tl.trans(kv)) * 2.0
        visible = column < tl.where(n < MAIN, chosen, recent)
        p = tl.where(visible[None, :], tl.exp2(s * scale - log_total[:, None]), 0.0)
        ds = round_bf16(p * (dp - dot_out[:, None]) * softmax_scale)
        pair = token * HEADS * COLUMNS + h[:, None] * COLUMNS + column[None, :]
        tl.store(weights + pair, round_bf16(p).to(weights.dtype.element_ty))
        tl.store(grad_scores + pair, ds.to(grad_scores.dtype.element_ty))
        dq = tl.dot(ds, kv, dq)
    tl.store(grad_query + tile, round_bf16(dq).to(grad_query.dtype.element_ty))


@triton.jit
def _entry_rows(
    query,
    grad_out,
    weights,
    grad_scores,
    counts,
    rows,
    MAIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One gradient row per (query, entry): dS^T Q + P^T dO, [T, MAIN, D] bf16."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) * BLOCK >= tl.load(counts + token * 2):
        return
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.arange(0, HEADS)
    pair = token * HEADS * COLUMNS + h[:, None] * COLUMNS + n[None, :]
    p = tl.trans(operand(tl.load(weights + pair)))
    ds = tl.trans(operand(tl.load(grad_scores + pair)))
    for d0 in tl.range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        tile = token * HEADS * D + h[:, None] * D + d[None, :]
        acc = tl.dot(ds, operand(tl.load(query + tile)))
        acc = tl.dot(p, operand(tl.load(grad_out + tile)), acc)
        tl.store(
            rows + (token * MAIN + n)[:, None] * D + d[None, :], round_bf16(acc).to(rows.dtype.element_ty)
        )


@triton.jit
def gather_rows(
    rows, pointers, slots, grad, KEYS: tl.constexpr, MAIN: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Add to one entry's gradient the rows listed for it, in list order."""
    entry = tl.program_id(0)
    begin = tl.load(pointers + entry)
    end = tl.load(pointers + entry + 1)
    d = tl.arange(0, D)
    acc = tl.load(grad + entry.to(tl.int64) * D + d)
    for x in tl.range(begin, end, BLOCK):
        j = x + tl.arange(0, BLOCK)
        slot = tl.load(slots + j, mask=j < end, other=0)
        row = (slot // KEYS).to(tl.int64) * MAIN + slot % KEYS
        part = tl.load(rows + row[:, None] * D + d[None, :], mask=(j < end)[:, None], other=0.0)
        acc += tl.sum(part.to(tl.float32), 0)
    tl.store(grad + entry.to(tl.int64) * D + d, acc)


@triton.jit
def _window_band(
    query,
    grad_out,
    weights,
    grad_scores,
    counts,
    grad,
    start,
    stop,
    low,
    MAIN: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add to the gradients of window rows `low` and up the part of queries start .. stop - 1."""
    begin = low + tl.program_id(1) * BLOCK
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    h = tl.arange(0, HEADS)
    j = begin + tl.arange(0, BLOCK)
    target = grad + j.to(tl.int64)[:, None] * D + d[None, :]
    acc = tl.load(target, mask=(j < stop)[:, None], other=0.0)
    for t in tl.range(tl.maximum(begin, start), tl.minimum(begin + BLOCK + WINDOW - 1, stop)):
        token = (t - start).to(tl.int64)
        size = tl.load(counts + token * 2 + 1)
        slot = j - t + size - 1
        seen = (slot >= 0) & (slot < size)
        pair = token * HEADS * COLUMNS + h[:, None] * COLUMNS + MAIN + slot[None, :]
        p = operand(tl.load(weights + pair, mask=seen[None, :], other=0.0))
        ds = operand(tl.load(grad_scores + pair, mask=seen[None, :], other=0.0))
        tile = token * HEADS * D + h[:, None] * D + d[None, :]
        acc = tl.dot(tl.trans(ds), operand(tl.load(query + tile)), acc)
        acc = tl.dot(tl.trans(p), operand(tl.load(grad_out + tile)), acc)
    tl.store(target, acc, mask=(j < stop)[:, None])


@dataclass(frozen=True)
class Saved:
    """What the forward keeps: its arguments and results, the number of entries and the selection."""

    query: Tensor
    table: Tensor
    keys: KeyRows
    indices: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    window_size: int
    entries: int
    kept: Kept | None = None


def backward(
    saved: Saved, grad_out: Tensor, inverse: InverseIndex | None, lost: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query [T, H, D] and the table [E + T, D] (fp32), and delta.

    Delta is the sum of `out * grad_out` over channels plus `lost` [T, H] fp32: what `saved.out` misses when
    it is turned otherwise than its gradient.
    """
    count, heads, channels = saved.query.shape
    main, total = saved.keys.main, saved.keys.rows.shape[1]
    chunk = inverse.chunk if inverse is not None else CHUNK
    if inverse is None and main:
        inverse = invert(saved.indices, saved.entries, chunk)
    size = min(chunk, count)
    bf16 = saved.query.dtype
    weights = saved.query.new_empty((2, size, heads, total))
    rows = torch.empty((size, main, channels), dtype=bf16, device=grad_out.device)
    grad_query = torch.empty_like(saved.query)
    delta = torch.empty_like(saved.lse)
    grad_table = torch.zeros((len(saved.table), channels), dtype=torch.float32, device=grad_out.device)
    for c, start in enumerate(range(0, count, chunk)):
        part = slice(start, min(start + chunk, count))
        _launch_query(saved, grad_out, lost, part, grad_query, weights, delta)
        if inverse is not None and main:
            _launch_entries(saved, grad_out, part, weights, rows)
            _launch_gather(saved, rows, inverse.pointers[c], inverse.slots[c], grad_table)
        _launch_window(saved, grad_out, part, weights, grad_table[saved.entries :])
    return grad_query, grad_table, delta


def _launch_query(
    saved: Saved,
    grad_out: Tensor,
    lost: Tensor,
    part: slice,
    grad_query: Tensor,
    weights: Tensor,
    delta: Tensor,
) -> None:
    count, heads, channels = saved.query[part].shape
    if saved.kept is not None:
        rows = KeyRows(saved.keys.rows[part], saved.keys.counts[part], saved.keys.main, saved.keys.block)
        kept = Kept(saved.kept.weights[part], saved.kept.tops[part])
        results = grad_query[part], weights[0], weights[1], delta[part]
        given = saved.out[part], grad_out[part], saved.lse[part], lost[part]
        query_gradient(saved.table, rows, *given, kept, *results, scale=saved.scale)
        return
    block_h = min(heads, 64)
    _query_gradient[(count, heads // block_h)](
        saved.query[part],
        saved.table,
        saved.keys.rows[part],
        saved.keys.counts[part],
        saved.out[part],
        grad_out[part],
        saved.lse[part],
        lost[part],
        grad_query[part],
        weights[0],
        weights[1],
        delta[part],
        saved.scale,
        LAYOUT_FLAG,
        MAIN=saved.keys.main,
        COLUMNS=saved.keys.rows.shape[1],
        HEADS=heads,
        BLOCK_H=block_h,
        D=channels,
        BLOCK=saved.keys.block,
        num_warps=8,
        num_stages=1,
    )


def _launch_entries(saved: Saved, grad_out: Tensor, part: slice, weights: Tensor, rows: Tensor) -> None:
    count, heads, channels = saved.query[part].shape
    main, counts = saved.keys.main, saved.keys.counts[part]
    if supports(saved.query, saved.keys):
        entry_rows(saved.query[part], grad_out[part], weights[0], weights[1], counts, rows)
        return
    block = next(b for b in (128, 64, 32, 16) if main % b == 0)
    _entry_rows[(count, main // block)](
        saved.query[part],
        grad_out[part],
        weights[0],
        weights[1],
        counts,
        rows,
        MAIN=main,
        COLUMNS=saved.keys.rows.shape[1],
        HEADS=heads,
        D=channels,
        BLOCK=block,
        BLOCK_D=min(64, channels),
        num_warps=8,
        num_stages=3,
    )


def _launch_gather(saved: Saved, rows: Tensor, pointers: Tensor, slots: Tensor, grad_table: Tensor) -> None:
    gather_rows[(saved.entries,)](
        rows,
        pointers,
        slots,
        grad_table,
        KEYS=saved.indices.shape[1],
        MAIN=saved.keys.main,
        D=saved.query.shape[2],
        BLOCK=32,
        num_warps=4,
    )


def _launch_window(saved: Saved, grad_out: Tensor, part: slice, weights: Tensor, grad_window: Tensor) -> None:
    _, heads, channels = saved.query.shape
    block, block_d = (64, min(128, channels)) if channels >= 64 else (16, channels)
    low = max(0, part.start - saved.window_size + 1) // block * block
    _window_band[(channels // block_d, triton.cdiv(part.stop - low, block))](
        saved.query[part],
        grad_out[part],
        weights[0],
        weights[1],
        saved.keys.counts[part],
        grad_window,
        part.start,
        part.stop,
        low,
        MAIN=saved.keys.main,
        WINDOW=saved.window_size,
        COLUMNS=saved.keys.rows.shape[1],
        HEADS=heads,
        D=channels,
        BLOCK=block,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=1,
    )
