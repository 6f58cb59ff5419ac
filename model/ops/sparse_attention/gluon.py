"""Forward of sparse attention with specialised warps, for 64 heads of 512: the fast mode.

One warpgroup gathers; two compute, side by side. Of each pair of 64-key tiles each computing warpgroup scores
one, and each accumulates half of the channels. No score is computed twice and every product has 64 columns,
which the plain kernel cannot have. Sums run in another order than in the plain kernel, so exact mode does not
use this one.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from model.ops.hopper import barrier, copy, signal, slot_barriers
from model.ops.sparse_attention.triton import Kept, KeyRows
from model.ops.tile import LN2, LOG2E, MASKED

HEADS, WIDTH, TILE = 64, 512, 64


@aggregate
class Shared:
    """Shared memory of one program: heads, a pair of tiles of keys, their weights, and barriers."""

    heads: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, heads, keys, weights, ready, free):
        self.heads, self.keys, self.weights = heads, keys, weights
        self.ready, self.free = ready, free


@gluon.jit
def used_pairs(counts, token, MAIN: gl.constexpr, BLOCK: gl.constexpr):
    """Pairs of tiles with selected entries; the rest before the window are left out."""
    chosen = gl.load(counts + token * 2)
    return gl.minimum((chosen + 2 * BLOCK - 1) // (2 * BLOCK), MAIN // (2 * BLOCK))


@gluon.jit
def visited(n, used, MAIN: gl.constexpr, BLOCK: gl.constexpr):
    """The n-th pair that is visited."""
    return n + gl.where(n < used, 0, MAIN // (2 * BLOCK) - used)


@gluon.jit
def weigh(shared, weights, acc, BLOCK: gl.constexpr):
    """Add weights [H, 2 BLOCK] times the pair's keys to `acc` [H, D], and hand the tiles back."""
    shared.weights.store(weights)
    fence_async_shared()
    barrier()
    for slot in gl.static_range(2):
        left = shared.weights.slice(slot * BLOCK, BLOCK, 1)
        acc = warpgroup_mma(left, shared.keys.slice(slot * BLOCK, BLOCK, 0), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        signal(shared.free.index(slot))
    return acc


@gluon.jit
def scores(shared, phase, LAYOUT: gl.constexpr, H: gl.constexpr, BLOCK: gl.constexpr):
    """Products [H, 2 BLOCK] of the heads with the next pair of tiles, once both are there."""
    mbarrier.wait(shared.ready.index(0), phase)
    mbarrier.wait(shared.ready.index(1), phase)
    fence_async_shared()
    zero = gl.zeros((H, 2 * BLOCK), gl.float32, LAYOUT)
    s = warpgroup_mma(shared.heads, shared.keys.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def _compute(
    shared,
    counts,
    sink,
    out,
    lse,
    kept,
    tops,
    token,
    softmax_scale,
    MAIN: gl.constexpr,
    COLUMNS: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    KEEP: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    VALUE_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    PAIRS: gl.constexpr = COLUMNS // (2 * BLOCK)
    scale = softmax_scale * LOG2E
    chosen = gl.load(counts + token * 2)
    recent = MAIN + gl.load(counts + token * 2 + 1)
    used = used_pairs(counts, token, MAIN, BLOCK)
    h = gl.arange(0, H, ROW)
    top = gl.load(sink + h) * (1.0 / softmax_scale)
    start = gl.exp2(top * 0.0)
    total = gl.zeros((H, 2 * BLOCK), gl.float32, SCORES)
    acc = gl.zeros((H, D), gl.float32, VALUES)
    for n in range(used + PAIRS - MAIN // (2 * BLOCK)):
        pair = visited(n, used, MAIN, BLOCK)
        column = 2 * pair * BLOCK + gl.arange(0, 2 * BLOCK, gl.SliceLayout(0, SCORES))
        s = scores(shared, n & 1, SCORES, H, BLOCK)
        s = gl.where(gl.expand_dims(column < gl.where(column < MAIN, chosen, recent), 0), s, MASKED)
        raised = gl.maximum(top, gl.max(s, 1))
        decay = gl.exp2((top - raised) * scale)
        top = raised
        p = gl.exp2(s * scale - gl.expand_dims(top * scale, 1))
        # Summed over columns at the end: until then no warp needs to know what the others have.
        total = total * gl.expand_dims(decay, 1) + p
        start = start * decay
        weights = p.to(gl.bfloat16)
        if KEEP:
            place = gl.expand_dims(h * COLUMNS, 1) + gl.expand_dims(column, 0)
            gl.store(kept + token * H * COLUMNS + place, weights)
            gl.store(tops + (token * PAIRS + pair) * H + h, top)
        acc = acc * gl.expand_dims(gl.convert_layout(decay, VALUE_ROW), 1)
        acc = weigh(shared, weights, acc, BLOCK)
    whole = start + gl.sum(total, 1)
    result = acc * gl.expand_dims(gl.convert_layout(1.0 / whole, VALUE_ROW), 1)
    row = gl.expand_dims(gl.arange(0, H, VALUE_ROW), 1)
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, VALUES)), 0)
    gl.store(out + token * H * D + row * D + d, result.to(gl.bfloat16))
    gl.store(lse + token * H + h, (top * scale + gl.log2(whole)) * LN2)


@gluon.jit
def gather(
    shared,
    table,
    rows,
    counts,
    token,
    MAIN: gl.constexpr,
    COLUMNS: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """Copy tile after tile into the two slots, 64 channels at a time; the rows are read one tile ahead."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    d = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0)
    used = used_pairs(counts, token, MAIN, BLOCK)
    pairs = used + COLUMNS // (2 * BLOCK) - MAIN // (2 * BLOCK)
    rows += token * COLUMNS + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
    at = 2 * visited(0, used, MAIN, BLOCK) * BLOCK
    i = gl.load(rows + at)
    for n in range(pairs):
        for slot in gl.static_range(2):
            source = table + gl.expand_dims(gl.maximum(i, 0) * D, 1) + d
            if slot == 0:
                i = gl.load(rows + at + BLOCK)
            else:
                at = 2 * visited(gl.minimum(n + 1, pairs - 1), used, MAIN, BLOCK) * BLOCK
                i = gl.load(rows + at)
            mbarrier.wait(shared.free.index(slot), (n & 1) ^ 1)
            keys = shared.keys.slice(slot * BLOCK, BLOCK, 0)
            for c in gl.static_range(D // 64):
                copy(keys.slice(c * 64, 64, 1), source + c * 64)
            async_copy.mbarrier_arrive(shared.ready.index(slot), increment_count=False)


@gluon.jit
def allocate(heads, H: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr):
    """Shared memory, with `heads` [H, D] copied into it before the warps part."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    heads_shared = gl.allocate_shared_memory(gl.bfloat16, [H, D], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2 * BLOCK, D], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [H, 2 * BLOCK], SHARED)
    ready, free = slot_barriers(2, 128, 1)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    h = gl.expand_dims(gl.arange(0, H, gl.SliceLayout(1, LAYOUT)), 1)
    d = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0)
    for c in gl.static_range(D // 64):
        copy(heads_shared.slice(c * 64, 64, 1), heads + c * 64 + h * D + d)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    return Shared(heads_shared, keys, weights, ready, free)


@gluon.jit
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
    MAIN: gl.constexpr,
    COLUMNS: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    KEEP: gl.constexpr,
):
    token = gl.program_id(0).to(gl.int64)
    shared = allocate(query + token * H * D, H, D, BLOCK)
    gl.warp_specialize(
        [
            (gather, (shared, table, rows, counts, token, MAIN, COLUMNS, D, BLOCK)),
            (_compute, (
                shared, counts, sink, out, lse, kept, tops, token, softmax_scale, MAIN, COLUMNS, H, D, BLOCK,
                KEEP,
            )),
        ],
        [8],
        [232],
    )  # fmt: skip


def supports(query: Tensor, keys: KeyRows) -> bool:
    """Whether this kernel serves the shapes: 64 heads of 512 in bf16 and whole pairs of tiles."""
    return (
        query.shape[1:] == (HEADS, WIDTH)
        and query.dtype == torch.bfloat16
        and keys.block == TILE
        and keys.rows.shape[1] % (2 * TILE) == 0
    )


def forward(
    query: Tensor, table: Tensor, keys: KeyRows, sink: Tensor, *, scale: float, kept: Kept | None = None
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [T, H], as `model.ops.sparse_attention.triton.forward`.

    Into `kept` go the probabilities, with a maximum for each pair of tiles.
    """
    assert table.numel() < 2**31, f"row offsets are 32 bits: {len(table)} rows are too many for one call"
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    _forward[(len(query),)](
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
        MAIN=keys.main,
        COLUMNS=keys.rows.shape[1],
        H=HEADS,
        D=WIDTH,
        BLOCK=TILE,
        KEEP=kept is not None,
        num_warps=4,
    )
    return out, lse
