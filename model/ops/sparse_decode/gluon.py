"""Decode attention with specialised warps, for 64 heads of 512: unpacking and products run side by side.

Two warpgroups unpack the tiles of 64 keys by turns, each into a slot of its own; a third computes. A program
has one query and half of the channels, and scores all keys. Tiles, their order and the layout of the scores
are those of `sparse_attention(..., exact=True)`, whose output this equals bit for bit.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from model.ops.hopper import barrier, signal, slot_barriers
from model.ops.tile import KEY_SCALE, LOG2E, MASKED, UNFUSED, e2m1_halves, e2m1_scale, e4m3_bits, e4m3_scale

HEADS, WIDTH, TURNED, TILE = 64, 512, 64, 64


@aggregate
class Shared:
    """Shared memory of one program: the query and two slots of keys, by halves of channels, and barriers."""

    q: gl.shared_memory_descriptor
    kv: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, kv, ready, free):
        self.q, self.kv, self.ready, self.free = q, kv, ready, free


@gluon.jit
def _turn(x, cosine, sine, sign, ROWS: gl.constexpr, WIDE: gl.constexpr):
    """Rows [ROWS, 64] bf16 turned in adjacent pairs."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    even, odd = gl.split(gl.reshape(x.to(gl.float32), (ROWS, 32, 2)))
    even, odd = gl.convert_layout(even, PAIRS), gl.convert_layout(odd, PAIRS)
    j = gl.arange(0, 32, gl.SliceLayout(0, PAIRS))
    cos = gl.expand_dims(gl.load(cosine + j), 0)
    sin = gl.expand_dims(gl.load(sine + j), 0) * sign
    turned = gl.join(gl.fma(even, cos, -(odd * sin)), gl.fma(odd, cos, even * sin))
    return gl.convert_layout(gl.reshape(turned, (ROWS, 64)), WIDE).to(gl.bfloat16)


@gluon.jit
def _compute(
    shared,
    query,
    cosine,
    sine,
    sink,
    out,
    partial_max,
    partial_sum,
    main_tiles,
    main_count,
    window_count,
    begin,
    end,
    row,
    split,
    half,
    softmax_scale,
    SPLITS: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    ROPE: gl.constexpr,
):
    HALF: gl.constexpr = D // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    VALUE_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.expand_dims(gl.arange(0, H, gl.SliceLayout(1, WIDE)), 1)
    c64 = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, WIDE)), 0)
    source = query + row * H * D + r * D + c64
    for c in gl.static_range(D // 64):
        x = gl.load(source + c * 64)
        if ROPE and c == D // 64 - 1:
            x = _turn(x, cosine + row * 32, sine + row * 32, 1.0, H, WIDE)
        shared.q.index(c * 64 // HALF).slice(c * 64 % HALF, 64, 1).store(x)
    fence_async_shared()
    barrier()

    scale = softmax_scale * LOG2E * KEY_SCALE
    h = gl.arange(0, H, ROW)
    top = gl.load(sink + h) * (1.0 / (softmax_scale * KEY_SCALE))
    total = gl.full((H,), 1.0, gl.float32, ROW)
    if split > 0:
        total = gl.zeros((H,), gl.float32, ROW)
    acc = gl.zeros((H, HALF), gl.float32, VALUES)
    n = gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
    for t in range(begin, end):
        slot = (t - begin) & 1
        mbarrier.wait(shared.ready.index(slot), ((t - begin) >> 1) & 1)
        s = gl.zeros((H, BLOCK), gl.float32, SCORES)
        first, second = shared.kv.index(2 * slot), shared.kv.index(2 * slot + 1)
        s = warpgroup_mma(shared.q.index(0), first.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(shared.q.index(1), second.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        limit = gl.where(t < main_tiles, main_count - t * BLOCK, window_count - (t - main_tiles) * BLOCK)
        s = gl.where(gl.expand_dims(n < limit, 0), s, MASKED)
        raised = gl.maximum(top, gl.max(s, 1))
        decay = gl.exp2((top - raised) * scale)
        p = gl.exp2(gl.fma(s, scale, -gl.expand_dims(raised * scale, 1)))
        total = gl.fma(total, decay, gl.sum(p, 1))
        top = raised
        acc = acc * gl.expand_dims(gl.convert_layout(decay, VALUE_ROW), 1)
        weights = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
        acc = warpgroup_mma(weights, shared.kv.index(2 * slot + half), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        signal(shared.free.index(slot))

    if SPLITS == 1:
        result = acc * gl.expand_dims(gl.convert_layout(1.0 / total * KEY_SCALE, VALUE_ROW), 1)
        # Through the query's place, from where rows are written whole.
        shared.q.index(0).store(result.to(gl.bfloat16))
        barrier()
        target = out + row * H * D + half * HALF + r * D + c64
        for c in gl.static_range(HALF // 64):
            x = shared.q.index(0).slice(c * 64, 64, 1).load(WIDE)
            if ROPE and c == HALF // 64 - 1:  # noqa: SIM102
                if half == 1:
                    x = _turn(x, cosine + row * 32, sine + row * 32, -1.0, H, WIDE)
            gl.store(target + c * 64, x)
    else:
        part = row * SPLITS + split
        d = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, VALUES))
        target = part * H * D + gl.expand_dims(gl.arange(0, H, VALUE_ROW), 1) * D + gl.expand_dims(d, 0)
        gl.store(out + target, acc)
        gl.store(partial_max + part * H + h, top * scale)
        gl.store(partial_sum + part * H + h, total)


@gluon.jit
def _unpack(
    shared,
    records,
    indices,
    window,
    window_indices,
    main_tiles,
    begin,
    end,
    row,
    who: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """Every other tile into slot `who`; rows are read one of its tiles ahead, records while it waits."""
    HALF: gl.constexpr = D // 2
    MAIN: gl.constexpr = D // 2 + D // 16
    RECENT: gl.constexpr = D + D // 32
    # Neighbouring lanes write rows of different parity, which shared memory keeps in different banks.
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 16, 1], [4, 1, 1], [2, 0, 1])
    SCALES: gl.constexpr = gl.SliceLayout(2, CODES)
    KEY: gl.constexpr = gl.SliceLayout(1, SCALES)
    r = gl.arange(0, BLOCK, KEY)
    g = gl.expand_dims(gl.arange(0, HALF // 16, gl.SliceLayout(0, SCALES)), 0)
    e = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, CODES))), 0), 1)
    at = gl.expand_dims(g, 2) * 16 + e
    first, second = shared.kv.index(2 * who), shared.kv.index(2 * who + 1)
    start = begin + who
    last = gl.minimum(main_tiles, end)
    indices += row * KEYS
    c = start * BLOCK + r
    i = gl.load(indices + c, mask=c < KEYS, other=0)
    for t in range(start, last, 2):
        record = gl.expand_dims(gl.maximum(i, 0).to(gl.int64) * MAIN, 1)
        codes = gl.load(records + gl.expand_dims(record, 2) + at)
        x0 = gl.load(records + record + HALF + g)
        x1 = gl.load(records + record + HALF + HALF // 16 + g)
        c = (t + 2) * BLOCK + r
        i = gl.load(indices + c, mask=c < KEYS, other=0)
        mbarrier.wait(shared.free.index(who), (((t - begin) >> 1) & 1) ^ 1)
        low, high = e2m1_halves(codes)
        first.store(gl.reshape(low * gl.expand_dims(e2m1_scale(x0), 2), (BLOCK, HALF)))
        second.store(gl.reshape(high * gl.expand_dims(e2m1_scale(x1), 2), (BLOCK, HALF)))
        fence_async_shared()
        signal(shared.ready.index(who))

    window_indices += row * WINDOW
    # The first window tile of this warpgroup.
    start += gl.maximum(last - start + 1, 0) // 2 * 2
    for t in range(start, end, 2):
        c = (t - main_tiles) * BLOCK + r
        i = gl.load(window_indices + c, mask=c < WINDOW, other=0)
        record = gl.expand_dims(gl.maximum(i, 0).to(gl.int64) * RECENT, 1)
        low = gl.load(window + gl.expand_dims(record, 2) + at)
        high = gl.load(window + gl.expand_dims(record, 2) + at + HALF)
        x0 = gl.load(window + record + D + g // 2)
        x1 = gl.load(window + record + D + HALF // 32 + g // 2)
        mbarrier.wait(shared.free.index(who), (((t - begin) >> 1) & 1) ^ 1)
        first.store(gl.reshape(e4m3_bits(low) * gl.expand_dims(e4m3_scale(x0), 2), (BLOCK, HALF)))
        second.store(gl.reshape(e4m3_bits(high) * gl.expand_dims(e4m3_scale(x1), 2), (BLOCK, HALF)))
        fence_async_shared()
        signal(shared.ready.index(who))


@gluon.jit
def _decode(
    query,
    records,
    indices,
    window,
    window_indices,
    counts,
    cosine,
    sine,
    sink,
    out,
    partial_max,
    partial_sum,
    softmax_scale,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
    SPLITS: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    ROPE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    row = gl.program_id(0).to(gl.int64)
    half, split = gl.program_id(1), gl.program_id(2)
    main_count, window_count = gl.load(counts + row * 2), gl.load(counts + row * 2 + 1)
    # Tiles of padding are left out: their weights are 0 and change nothing.
    main_tiles = (main_count + BLOCK - 1) // BLOCK
    tiles = main_tiles + (window_count + BLOCK - 1) // BLOCK
    part = (tiles + SPLITS - 1) // SPLITS
    begin = split * part
    end = gl.minimum(begin + part, tiles)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(gl.bfloat16, [2, H, D // 2], SHARED)
    kv = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK, D // 2], SHARED)
    ready, free = slot_barriers(2, 1, 1)
    shared = Shared(q, kv, ready, free)
    barrier()
    # The tuples stand here, or constants in them would become tensors.
    gl.warp_specialize(
        [
            (_compute, (
                shared, query, cosine, sine, sink, out, partial_max, partial_sum, main_tiles, main_count,
                window_count, begin, end, row, split, half, softmax_scale, SPLITS, H, D, BLOCK, ROPE,
            )),
            (_unpack, (
                shared, records, indices, window, window_indices, main_tiles, begin, end, row, 0, KEYS,
                WINDOW, D, BLOCK,
            )),
            (_unpack, (
                shared, records, indices, window, window_indices, main_tiles, begin, end, row, 1, KEYS,
                WINDOW, D, BLOCK,
            )),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


def launch(
    query: Tensor,
    records: Tensor,
    indices: Tensor,
    window: Tensor,
    window_indices: Tensor,
    counts: Tensor,
    sink: Tensor,
    out: Tensor,
    stats: Tensor,
    *,
    scale: float,
    rope: tuple[Tensor, Tensor] | None,
    splits: int,
    registers: int = 128,
) -> None:
    """Write `out` [B, H, D], or with splits its fp32 parts [B * splits, H, D] and their `stats`."""
    cosine, sine = (sink, sink) if rope is None else rope
    _decode[(len(query), 2, splits)](
        query,
        records,
        indices,
        window,
        window_indices,
        counts,
        cosine,
        sine,
        sink,
        out,
        stats[0],
        stats[1],
        scale,
        KEYS=indices.shape[1],
        WINDOW=window_indices.shape[1],
        SPLITS=splits,
        H=HEADS,
        D=WIDTH,
        BLOCK=TILE,
        ROPE=rope is not None,
        REGISTERS=registers,
        num_warps=4,
        **UNFUSED,
    )


def supports(query: Tensor, rope: tuple[Tensor, Tensor] | None) -> bool:
    """Whether this kernel serves the shapes: 64 heads of 512 in bf16, of which 64 channels are turned."""
    return (
        query.shape[1:] == (HEADS, WIDTH)
        and query.dtype == torch.bfloat16
        and (rope is None or rope[0].shape[1] == TURNED // 2)
    )
