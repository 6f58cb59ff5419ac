"""Decode attention over packed records: unpack in registers, score, and accumulate in one pass over the keys.

The pass is bound by the latency of index -> record -> unpack -> scores -> softmax -> values, not by bytes,
so the keys of one query are split over a few programs (fp32 partials, merged in a fixed order) and the
channels over two.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.rotary.triton import rotary_
from model.ops.sparse_decode import gluon
from model.ops.tile import (
    INTERPRET,
    KEY_SCALE,
    LAYOUT_FLAG,
    LOG2E,
    MASKED,
    UNFUSED,
    branched_dot2,
    e2m1_halves,
    e2m1_scale,
    e4m3_bits,
    e4m3_scale,
    operand,
    round_bf16,
    scale_groups,
    turn_back,
    turned,
)


@dataclass(frozen=True)
class Tiling:
    """How one query is cut: key splits, programs that share the channels, keys a step, and so on."""

    splits: int
    halves: int
    block: int
    window_block: int
    warps: int
    stages: int
    branched: bool


# Fixed per range of batch sizes, never chosen by occupancy. The specialised kernel has the same splits.
LARGE_BATCH = Tiling(splits=1, halves=2, block=64, window_block=32, warps=4, stages=2, branched=False)
SMALL_BATCH = Tiling(splits=4, halves=2, block=128, window_block=32, warps=4, stages=1, branched=False)
EXACT = Tiling(splits=1, halves=2, block=64, window_block=64, warps=4, stages=2, branched=False)


def tiling(batch: int, exact: bool) -> Tiling:
    """The tiling for a number of query tokens; exact mode has one for all."""
    if exact:
        return EXACT
    return LARGE_BATCH if batch > 32 else SMALL_BATCH


@triton.jit
def _count(indices, KEYS: tl.constexpr):
    """How many of a row's indices are set; the rest stand at its end."""
    c = tl.arange(0, triton.next_power_of_2(KEYS))
    return tl.sum((tl.load(indices + c, mask=c < KEYS, other=-1) >= 0).to(tl.int32), 0)


@triton.jit
def _accumulate(
    q0,
    q1,
    k0,
    k1,
    visible,
    acc0,
    acc1,
    top,
    total,
    scale,
    flag,
    half,
    HALVES: tl.constexpr,
    BRANCHED: tl.constexpr,
):
    """One step of the online softmax over a tile of keys given as two halves of their channels."""
    if BRANCHED:
        s = branched_dot2(q0, tl.trans(k0), q1, tl.trans(k1), flag)
    else:
        s = tl.dot(q0, tl.trans(k0))
        s = tl.dot(q1, tl.trans(k1), s)
    s = tl.where(visible[None, :], s, MASKED)
    raised = tl.maximum(top, tl.max(s, 1))
    decay = tl.exp2((top - raised) * scale)
    p = tl.exp2(tl.fma(s, scale, -(raised * scale)[:, None]))
    total = tl.fma(total, decay, tl.sum(p, 1))
    weights = round_bf16(p)
    if HALVES == 1:
        acc0 = tl.dot(weights, k0, acc0 * decay[:, None])
        acc1 = tl.dot(weights, k1, acc1 * decay[:, None])
    else:
        if half == 0:
            acc0 = tl.dot(weights, k0, acc0 * decay[:, None])
        else:
            acc0 = tl.dot(weights, k1, acc0 * decay[:, None])
    return acc0, acc1, raised, total


@triton.jit
def _decode(
    query, records, indices, window, window_indices, counts, cosine, sine, sink, out, partial_max,
    partial_sum, softmax_scale, flag, KEYS: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr, BRANCHED: tl.constexpr, COUNTED: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    half = tl.program_id(2)
    HALF: tl.constexpr = D // 2
    if COUNTED:
        main_count = tl.load(counts + row * 2)
        window_count = tl.load(counts + row * 2 + 1)
    else:
        main_count = _count(indices + row * KEYS, KEYS)
        window_count = _count(window_indices + row * WINDOW, WINDOW)
    h = tl.arange(0, TILE)
    if HEADS != TILE:
        # Further rows of the tile repeat the last head and write the same once more.
        h = tl.minimum(h, HEADS - 1)
    d = tl.arange(0, HALF)
    q_pointer = query + row * HEADS * D + h[:, None] * D + d[None, :]
    q0 = operand(tl.load(q_pointer))
    q1 = operand(tl.load(q_pointer + HALF))
    if ROPE > 0:
        at = row * (ROPE // 2)
        q1 = turned(q1, q_pointer + HALF, HALF + d, cosine + at, sine + at, D, ROPE)
    scale = softmax_scale * LOG2E * KEY_SCALE
    acc0 = tl.zeros((TILE, HALF), tl.float32)
    acc1 = tl.zeros((TILE, HALF), tl.float32)
    top = tl.load(sink + h) * (1.0 / (softmax_scale * KEY_SCALE))
    total = tl.full((TILE,), 1.0, tl.float32)
    if split > 0:
        total = tl.zeros((TILE,), tl.float32)

    MAIN: tl.constexpr = D // 2 + D // 16
    g = tl.arange(0, HALF // 16)
    PART: tl.constexpr = (KEYS + SPLITS - 1) // SPLITS
    limit = tl.minimum(main_count, (split + 1) * PART)
    for n in tl.range(split * PART, (split + 1) * PART, BLOCK):
        c = n + tl.arange(0, BLOCK)
        i = tl.load(indices + row * KEYS + c, mask=c < KEYS, other=-1)
        record = records + tl.maximum(i, 0).to(tl.int64)[:, None] * MAIN
        codes = tl.load(record + d[None, :])
        s0 = e2m1_scale(tl.load(record + HALF + g[None, :]))
        s1 = e2m1_scale(tl.load(record + HALF + HALF // 16 + g[None, :]))
        low, high = e2m1_halves(codes)
        k0 = scale_groups(low, s0, BLOCK, HALF, 16)
        k1 = scale_groups(high, s1, BLOCK, HALF, 16)
        acc0, acc1, top, total = _accumulate(
            q0, q1, k0, k1, c < limit, acc0, acc1, top, total, scale, flag, half, HALVES, BRANCHED
        )

    RECENT: tl.constexpr = D + D // 32
    e = tl.arange(0, HALF // 32)
    WINDOW_PART: tl.constexpr = (WINDOW + SPLITS - 1) // SPLITS
    limit = tl.minimum(window_count, (split + 1) * WINDOW_PART)
    for n in tl.range(split * WINDOW_PART, (split + 1) * WINDOW_PART, WINDOW_BLOCK):
        c = n + tl.arange(0, WINDOW_BLOCK)
        if WINDOW % (SPLITS * WINDOW_BLOCK) == 0:
            i = tl.load(window_indices + row * WINDOW + c)
        else:
            i = tl.load(window_indices + row * WINDOW + c, mask=c < WINDOW, other=-1)
        record = window + tl.maximum(i, 0).to(tl.int64)[:, None] * RECENT
        s0 = e4m3_scale(tl.load(record + D + e[None, :]))
        s1 = e4m3_scale(tl.load(record + D + HALF // 32 + e[None, :]))
        k0 = scale_groups(e4m3_bits(tl.load(record + d[None, :])), s0, WINDOW_BLOCK, HALF, 32)
        k1 = scale_groups(e4m3_bits(tl.load(record + HALF + d[None, :])), s1, WINDOW_BLOCK, HALF, 32)
        acc0, acc1, top, total = _accumulate(
            q0, q1, k0, k1, c < limit, acc0, acc1, top, total, scale, flag, half, HALVES, BRANCHED
        )

    if SPLITS == 1:
        norm = (1.0 / total * KEY_SCALE)[:, None]
        o = out + row * HEADS * D + half * HALF + h[:, None] * D + d[None, :]
        tl.store(o, round_bf16(acc0 * norm).to(out.dtype.element_ty))
        if HALVES == 1:
            tl.store(o + HALF, round_bf16(acc1 * norm).to(out.dtype.element_ty))
        if ROPE > 0:  # noqa: SIM102
            if half == HALVES - 1:
                at = row * (ROPE // 2)
                heads = row * HEADS + tl.arange(0, HEADS)[:, None]
                turn_back(out + heads * D, cosine + at, sine + at, HEADS, D, ROPE)
    else:
        part = row * SPLITS + split
        o = out + part * HEADS * D + half * HALF + h[:, None] * D + d[None, :]
        tl.store(o, acc0)
        if HALVES == 1:
            tl.store(o + HALF, acc1)
        tl.store(partial_max + part * HEADS + h, top * scale)
        tl.store(partial_sum + part * HEADS + h, total)


@triton.jit
def _combine(
    partial,
    partial_max,
    partial_sum,
    cosine,
    sine,
    out,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Merge the partial results of one query's splits, in the order of the splits."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    top = tl.full((BLOCK,), MASKED, tl.float32)
    for s in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(partial_max + (row * SPLITS + s) * HEADS + h))
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for s in tl.static_range(SPLITS):
        part = row * SPLITS + s
        weight = tl.exp2(tl.load(partial_max + part * HEADS + h) - top)
        total += weight * tl.load(partial_sum + part * HEADS + h)
        acc += weight[:, None] * tl.load(partial + part * HEADS * D + h[:, None] * D + d[None, :])
    o = out + row * HEADS * D + h[:, None] * D + d[None, :]
    tl.store(o, round_bf16(acc * (1.0 / total * KEY_SCALE)[:, None]).to(out.dtype.element_ty))
    if ROPE > 0:
        at = row * (ROPE // 2)
        turn_back(out + (row * HEADS + h[:, None]) * D, cosine + at, sine + at, BLOCK, D, ROPE)


def decode(
    query: Tensor,
    records: Tensor,
    indices: Tensor,
    window: Tensor,
    window_indices: Tensor,
    sink: Tensor,
    *,
    scale: float,
    counts: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    exact: bool = False,
    cut: Tiling | None = None,
) -> Tensor:
    """See `model.ops.sparse_decode.sparse_decode`; `cut` replaces the tiling (for tests and benchmarks)."""
    rows, heads, channels = query.shape
    if rope is not None and 4 * rope[0].shape[1] > channels:
        # The kernels turn channels of the second half alone.
        options = {"scale": scale, "counts": counts, "exact": exact, "cut": cut}
        turned = rotary_(query.clone(memory_format=torch.contiguous_format), *rope, 1.0)
        out = decode(turned, records, indices, window, window_indices, sink, **options)
        return rotary_(out, *rope, -1.0)
    query, records, window = query.contiguous(), records.contiguous(), window.contiguous()
    indices, window_indices = indices.contiguous(), window_indices.contiguous()
    specialised = cut is None and not INTERPRET.value and gluon.supports(query, rope)
    cut = cut or tiling(rows, exact)
    splits = cut.splits
    out = torch.empty_like(query)
    parts = rows * splits if splits > 1 else 0
    partial = query.new_empty((parts, heads, channels), dtype=torch.float32) if parts else out
    stats = query.new_empty((2, max(parts, 1), heads), dtype=torch.float32)
    given = query, records, indices, window, window_indices
    cosine, sine = (sink, sink) if rope is None else rope
    if specialised:
        if counts is None:
            counts = torch.stack([(indices >= 0).sum(1), (window_indices >= 0).sum(1)], 1).int()
        gluon.launch(*given, counts.contiguous(), sink, partial, stats, scale=scale, rope=rope, splits=splits)
    else:
        _decode[(rows, splits, cut.halves)](
            *given,
            indices if counts is None else counts.contiguous(),
            cosine,
            sine,
            sink,
            partial,
            stats[0],
            stats[1],
            scale,
            LAYOUT_FLAG,
            KEYS=indices.shape[1],
            WINDOW=window_indices.shape[1],
            HEADS=heads,
            # As in `sparse_attention(..., exact=True)`.
            TILE=max(heads, 64) if exact else heads,
            D=channels,
            SPLITS=splits,
            HALVES=cut.halves,
            BLOCK=cut.block,
            WINDOW_BLOCK=cut.window_block,
            BRANCHED=cut.branched,
            COUNTED=counts is not None,
            ROPE=0 if rope is None else 2 * cosine.shape[1],
            num_warps=cut.warps,
            num_stages=cut.stages,
            **UNFUSED,
        )
    if parts:
        block = min(8, heads)
        _combine[(rows, heads // block)](
            partial,
            stats[0],
            stats[1],
            cosine,
            sine,
            out,
            SPLITS=splits,
            HEADS=heads,
            D=channels,
            BLOCK=block,
            ROPE=0 if rope is None else 2 * cosine.shape[1],
            num_warps=4,
        )
    return out
