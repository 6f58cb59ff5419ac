"""Forward of sparse attention with specialised warps, for 64 heads of 512: the fast mode.

One warpgroup gathers; two compute. Of each pair of 64-key tiles each computing warpgroup scores one, row
maxima and probabilities are exchanged through shared memory, and each accumulates half of the channels. No
score is computed twice and every product has 64 columns, which the plain kernel cannot have. Sums run in
another order than in the plain kernel, so exact mode does not use this one.

Shared maxima are reused in the next step: a warpgroup overwrites its own only after it saw the other's
probabilities, which the other forms after reading them. `compute-sanitizer --tool racecheck` does not follow
this order through barriers that one thread of a warpgroup signals, and reports it.
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

from model.ops.sparse_attention.triton import KeyRows

HEADS, WIDTH, TILE = 64, 512, 64
# Later Triton has other names for these two.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@aggregate
class Shared:
    """Shared memory of one program: query, two slots of keys, probabilities, row maxima, and barriers."""

    q: gl.shared_memory_descriptor
    kv: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    top: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    top_done: gl.shared_memory_descriptor
    p_done: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, kv, p, top, ready, free, top_done, p_done):
        self.q, self.kv, self.p, self.top = q, kv, p, top
        self.ready, self.free, self.top_done, self.p_done = ready, free, top_done, p_done


@gluon.jit
def _signal(barrier):
    """All threads of the warpgroup are done: tell the others."""
    _barrier()
    mbarrier.arrive(barrier)


@gluon.jit
def _compute(
    shared,
    counts,
    sink,
    out,
    lse,
    token,
    softmax_scale,
    who: gl.constexpr,
    MAIN: gl.constexpr,
    COLUMNS: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
):
    HALF: gl.constexpr = D // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    VALUE_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    scale = softmax_scale * 1.4426950408889634
    chosen = gl.load(counts + token * 2)
    recent = MAIN + gl.load(counts + token * 2 + 1)
    h = gl.arange(0, H, ROW)
    top = gl.load(sink + h) * (1.0 / softmax_scale)
    total = gl.full((H,), 1.0, gl.float32, ROW)
    if who == 1:
        total = gl.zeros((H,), gl.float32, ROW)
    acc = gl.zeros((H, HALF), gl.float32, VALUES)
    PAIRS: gl.constexpr = COLUMNS // (2 * BLOCK)
    for n in range(PAIRS):
        phase = n & 1
        start = (2 * n + who) * BLOCK
        column = start + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
        mbarrier.wait(shared.ready.index(who), phase)
        fence_async_shared()
        zero = gl.zeros((H, BLOCK), gl.float32, SCORES)
        keys = shared.kv.index(who).permute((1, 0))
        s = warpgroup_mma(shared.q, keys, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        limit = gl.where(start < MAIN, chosen, recent)
        s = gl.where(gl.expand_dims(column < limit, 0), s, -1e30)
        own = gl.max(s, 1)
        shared.top.index(who).store(own)
        _signal(shared.top_done.index(who))
        mbarrier.wait(shared.top_done.index(1 - who), phase)
        raised = gl.maximum(top, gl.maximum(own, shared.top.index(1 - who).load(ROW)))
        decay = gl.exp2((top - raised) * scale)
        top = raised
        p = gl.exp2(s * scale - gl.expand_dims(top * scale, 1))
        total = total * decay + gl.sum(p, 1)
        weights = p.to(gl.bfloat16)
        shared.p.index(who).store(weights)
        fence_async_shared()
        _signal(shared.p_done.index(who))
        acc = acc * gl.expand_dims(gl.convert_layout(decay, VALUE_ROW), 1)
        # Both take tile 0 first, so that its slot is free early.
        first = shared.kv.index(0).slice(who * HALF, HALF, 1)
        if who == 0:
            acc = warpgroup_mma(gl.convert_layout(weights, OPERAND), first, acc, is_async=True)
            mbarrier.wait(shared.p_done.index(1), phase)
            mbarrier.wait(shared.ready.index(1), phase)
            fence_async_shared()
        else:
            mbarrier.wait(shared.p_done.index(0), phase)
            mbarrier.wait(shared.ready.index(0), phase)
            fence_async_shared()
            acc = warpgroup_mma(shared.p.index(0), first, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _signal(shared.free.index(0))
        second = shared.kv.index(1).slice(who * HALF, HALF, 1)
        acc = warpgroup_mma(shared.p.index(1), second, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _signal(shared.free.index(1))
    # The two parts of the denominator: addition commutes, so both warpgroups get the same bits.
    shared.top.index(who).store(total)
    _signal(shared.top_done.index(who))
    mbarrier.wait(shared.top_done.index(1 - who), PAIRS & 1)
    total = total + shared.top.index(1 - who).load(ROW)
    result = acc * gl.expand_dims(gl.convert_layout(1.0 / total, VALUE_ROW), 1)
    row = gl.arange(0, H, VALUE_ROW)
    d = who * HALF + gl.arange(0, HALF, gl.SliceLayout(0, VALUES))
    target = out + token * H * D + gl.expand_dims(row, 1) * D + gl.expand_dims(d, 0)
    gl.store(target, result.to(gl.bfloat16))
    if who == 0:
        gl.store(lse + token * H + h, (top * scale + gl.log2(total)) * 0.6931471805599453)


@gluon.jit
def _gather(
    shared,
    table,
    rows,
    token,
    COLUMNS: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """Copy tile after tile into the two slots, 64 channels at a time; the rows are read one tile ahead."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    d = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    n_row = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
    rows += token * COLUMNS
    i = gl.load(rows + n_row)
    for n in range(COLUMNS // BLOCK):
        slot = n % 2
        phase = (n // 2) & 1
        source = table + gl.expand_dims(gl.maximum(i, 0) * D, 1) + gl.expand_dims(d, 0)
        i = gl.load(rows + min((n + 1) * BLOCK, COLUMNS - BLOCK) + n_row)
        mbarrier.wait(shared.free.index(slot), phase ^ 1)
        keys = shared.kv.index(slot)
        for c in gl.static_range(D // 64):
            _copy(keys.slice(c * 64, 64, 1), source + c * 64)
        async_copy.mbarrier_arrive(shared.ready.index(slot), increment_count=False)


@gluon.jit
def _allocate(H: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr):
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [H, D], SHARED)
    kv_shared = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, D], SHARED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [2, H, BLOCK], SHARED)
    top_shared = gl.allocate_shared_memory(gl.float32, [2, H], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    top_done = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    p_done = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for k in gl.static_range(2):
        mbarrier.init(ready.index(k), 128)
        mbarrier.init(free.index(k), 2)
        mbarrier.init(top_done.index(k), 1)
        mbarrier.init(p_done.index(k), 1)
    return Shared(q_shared, kv_shared, p_shared, top_shared, ready, free, top_done, p_done)


@gluon.jit
def _forward(
    query,
    table,
    rows,
    counts,
    sink,
    out,
    lse,
    softmax_scale,
    MAIN: gl.constexpr,
    COLUMNS: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
):
    token = gl.program_id(0).to(gl.int64)
    shared = _allocate(H, D, BLOCK)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    h = gl.expand_dims(gl.arange(0, H, gl.SliceLayout(1, LAYOUT)), 1)
    d = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0)
    for c in gl.static_range(D // 64):
        source = query + token * H * D + c * 64 + h * D + d
        _copy(shared.q.slice(c * 64, 64, 1), source)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()
    gl.warp_specialize(
        [
            (
                _compute,
                (shared, counts, sink, out, lse, token, softmax_scale, 0, MAIN, COLUMNS, H, D, BLOCK),
            ),
            (
                _compute,
                (shared, counts, sink, out, lse, token, softmax_scale, 1, MAIN, COLUMNS, H, D, BLOCK),
            ),
            (_gather, (shared, table, rows, token, COLUMNS, D, BLOCK)),
        ],
        [4, 4],
        [232, 40],
    )


def supports(query: Tensor, keys: KeyRows) -> bool:
    """Whether this kernel serves the shapes: 64 heads of 512 in bf16 and whole pairs of tiles."""
    return (
        query.shape[1:] == (HEADS, WIDTH)
        and query.dtype == torch.bfloat16
        and keys.block == TILE
        and keys.rows.shape[1] % (2 * TILE) == 0
    )


def forward(
    query: Tensor, table: Tensor, keys: KeyRows, sink: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [T, H], as `model.ops.sparse_attention.triton.forward`."""
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
        scale,
        MAIN=keys.main,
        COLUMNS=keys.rows.shape[1],
        H=HEADS,
        D=WIDTH,
        BLOCK=TILE,
        num_warps=4,
    )
    return out, lse
