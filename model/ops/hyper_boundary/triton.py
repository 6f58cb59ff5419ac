"""Two memory-bound passes: update with input mix and norm, then the coefficients.

One kernel for both is slower: the projection's product needs tiles that the update's registers leave no room
for.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from model.ops.side import arrivals, processors
from model.ops.tile import UNFUSED, operand, round_bf16

_LOGITS = 32
# With no more rows than these, the parts of a projection's sum are programs of their own.
_FEW_ROWS = 512


@triton.jit
def _update(
    streams,
    branch,
    place,
    coefficients,
    norm,
    updated,
    normed,
    squares,
    count,
    eps,
    D: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (t < count)[:, None]
    row = t.to(tl.int64)[:, None]
    k = tl.load(
        coefficients + t[:, None] * 24 + tl.arange(0, 32)[None, :],
        mask=inside & (tl.arange(0, 32) < 24)[None, :],
    )
    pick = tl.arange(0, 32)[None, :]
    mixes = ()
    square = tl.zeros((BLOCK, CHUNK), tl.float32)
    length = tl.zeros((BLOCK, CHUNK), tl.float32)
    for n in tl.static_range(0, D, CHUNK):
        d = n + tl.arange(0, CHUNK)[None, :]
        keep = inside & (d < D)
        if TERMS == 0:
            y = tl.load(branch + row * D + d, mask=keep, other=0.0).to(tl.float32)
        else:
            y = tl.zeros((BLOCK, CHUNK), tl.float32)
            for j in tl.static_range(TERMS):
                term = tl.load(place + row * TERMS + j, mask=inside, other=0).to(tl.int64)
                y += tl.load(branch + term * D + d, mask=keep, other=0.0).to(tl.float32)
            y = round_bf16(y).to(tl.float32)
        x = streams + row * (4 * D) + d
        x0 = tl.load(x, mask=keep, other=0.0).to(tl.float32)
        x1 = tl.load(x + D, mask=keep, other=0.0).to(tl.float32)
        x2 = tl.load(x + 2 * D, mask=keep, other=0.0).to(tl.float32)
        x3 = tl.load(x + 3 * D, mask=keep, other=0.0).to(tl.float32)
        mix = tl.zeros((BLOCK, CHUNK), tl.float32)
        for o in tl.static_range(4):
            z = _coefficient(k, pick, 4 + o) * y
            z = tl.fma(_coefficient(k, pick, 8 + o), x0, z)
            z = tl.fma(_coefficient(k, pick, 12 + o), x1, z)
            z = tl.fma(_coefficient(k, pick, 16 + o), x2, z)
            z = round_bf16(tl.fma(_coefficient(k, pick, 20 + o), x3, z))
            tl.store(updated + row * (4 * D) + o * D + d, z.to(updated.dtype.element_ty), mask=keep)
            length = tl.fma(z.to(tl.float32), z.to(tl.float32), length)
            mix = tl.fma(_coefficient(k, pick, o), z.to(tl.float32), mix)
        mix = round_bf16(mix)
        mixes = mixes + (mix,)  # noqa: RUF005
        square = tl.fma(mix.to(tl.float32), mix.to(tl.float32), square)
    tl.store(squares + t, tl.sum(length, 1), mask=t < count)
    factor = tl.rsqrt(tl.sum(square, 1) * (1.0 / D) + eps)[:, None]
    for j in tl.static_range(0, len(mixes)):
        d = j * CHUNK + tl.arange(0, CHUNK)[None, :]
        weight = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        out = round_bf16(mixes[j].to(tl.float32) * factor * weight)
        tl.store(normed + row * D + d, out.to(normed.dtype.element_ty), mask=inside & (d < D))


@triton.jit
def _coefficient(k, pick, number: tl.constexpr):
    """Column `number` of the coefficients [BLOCK, 32], as [BLOCK, 1]."""
    return tl.sum(tl.where(pick == number, k, 0.0), 1)[:, None]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _shared_out(a, b, c, d):
    """Four values divided by their sum. Written out: a reduction's order depends on the size of its tile."""
    factor = 1.0 / (a + b + c + d + 1e-6)
    return a * factor, b * factor, c * factor, d * factor


@triton.jit
def _row(logits, first: tl.constexpr, inside):
    """Softmax of logits `first` to `first + 3`, each [BLOCK]."""
    a = tl.load(logits + first, mask=inside, other=0.0)
    b = tl.load(logits + first + 1, mask=inside, other=0.0)
    c = tl.load(logits + first + 2, mask=inside, other=0.0)
    d = tl.load(logits + first + 3, mask=inside, other=0.0)
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    factor = 1.0 / (a + b + c + d)
    return a * factor + 1e-6, b * factor + 1e-6, c * factor + 1e-6, d * factor + 1e-6


@triton.jit
def _store_row(out, a, b, c, d, inside):
    tl.store(out, a, mask=inside)
    tl.store(out + 1, b, mask=inside)
    tl.store(out + 2, c, mask=inside)
    tl.store(out + 3, d, mask=inside)


@triton.jit
def _finish(acc, square, base, factor, logits, out, t, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """Gates and Sinkhorn rounds from the projection [BLOCK, 64] of streams with sums of squares `square`."""
    m = tl.sum(tl.reshape(acc, (BLOCK, 2, 32)), 1) * tl.rsqrt(square * (1.0 / K) + 1e-20)[:, None]
    j = tl.arange(0, 32)[None, :]
    m = tl.fma(m, factor, base)
    gate = _sigmoid(m)
    gate = tl.where(j < 4, gate + 1e-6, 2.0 * gate)
    inside = t < count
    keep = inside[:, None]
    tl.store(out + t.to(tl.int64)[:, None] * 24 + j, gate, mask=keep & (j < 8))
    tl.store(logits + t.to(tl.int64)[:, None] * 32 + j, m, mask=keep)
    tl.debug_barrier()
    row = logits + t.to(tl.int64) * 32
    a0, a1, a2, a3 = _row(row, 8, inside)
    b0, b1, b2, b3 = _row(row, 12, inside)
    c0, c1, c2, c3 = _row(row, 16, inside)
    d0, d1, d2, d3 = _row(row, 20, inside)
    for n in tl.range(0, 20):
        if n > 0:
            a0, a1, a2, a3 = _shared_out(a0, a1, a2, a3)
            b0, b1, b2, b3 = _shared_out(b0, b1, b2, b3)
            c0, c1, c2, c3 = _shared_out(c0, c1, c2, c3)
            d0, d1, d2, d3 = _shared_out(d0, d1, d2, d3)
        a0, b0, c0, d0 = _shared_out(a0, b0, c0, d0)
        a1, b1, c1, d1 = _shared_out(a1, b1, c1, d1)
        a2, b2, c2, d2 = _shared_out(a2, b2, c2, d2)
        a3, b3, c3, d3 = _shared_out(a3, b3, c3, d3)
    row = out + t.to(tl.int64) * 24
    _store_row(row + 8, a0, a1, a2, a3, inside)
    _store_row(row + 12, b0, b1, b2, b3, inside)
    _store_row(row + 16, c0, c1, c2, c3, inside)
    _store_row(row + 20, d0, d1, d2, d3, inside)


@triton.jit
def _coefficients(
    streams,
    squares,
    projection,
    base,
    scale,
    logits,
    out,
    partial,
    counters,
    count,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Projection, then gates and Sinkhorn rounds."""
    coefficient_part(
        tl.program_id(0), tl.program_id(1), streams, squares, projection, base, scale, logits, out, partial,
        counters, count, K, BLOCK, DEPTH, PARTS, TOGETHER,
    )  # fmt: skip


@triton.jit
def coefficient_part(
    block, first, streams, squares, projection, base, scale, logits, out, partial, counters, count,
    K: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Part `first` of the sum for the rows of `block`.

    Columns 0-31 and 32-63 of the projection are the high and low parts of the weight. The sum over K is cut
    into PARTS, which with few rows are programs of their own: the last to arrive adds them up in order.

    The sums of squares come from the caller: Triton 3.6 races when a pipelined operand of a dot is used in
    other arithmetic too, and a second load would not be pipelined.
    """
    t = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.minimum(t, count - 1).to(tl.int64)[:, None]
    n = tl.arange(0, 64)[None, :]
    PART: tl.constexpr = K // PARTS
    # Read before the sum, which then does not wait for them.
    square = tl.load(squares + t, mask=t < count, other=1.0)
    j = tl.arange(0, 32)[None, :]
    factor = tl.load(scale + tl.minimum(j // 4, 2))
    start = tl.load(base + j, mask=j < 24, other=0.0)
    total = tl.zeros((BLOCK, 64), tl.float32)
    for p in tl.range(first, (PARTS if TOGETHER else first + 1)):
        acc = tl.zeros((BLOCK, 64), tl.float32)
        for k in tl.range(0, PART, DEPTH):
            c = p * PART + k + tl.arange(0, DEPTH)
            x = operand(tl.load(streams + row * K + c[None, :]))
            acc = tl.dot(x, operand(tl.load(projection + c[:, None] * 64 + n)), acc)
        total += acc
    if TOGETHER:
        _finish(total, square, start, factor, logits, out, t, count, K, BLOCK)
    else:
        at = block.to(tl.int64) * (PARTS * BLOCK * 64)
        tile = at + tl.arange(0, BLOCK)[:, None] * 64 + n
        tl.store(partial + tile + first * (BLOCK * 64), total)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + block, 1)
        if arrived == PARTS - 1:
            total = tl.zeros((BLOCK, 64), tl.float32)
            for q in tl.static_range(PARTS):
                total += tl.load(partial + tile + q * (BLOCK * 64), cache_modifier=".cg")
            tl.store(counters + block, 0)
            _finish(total, square, start, factor, logits, out, t, count, K, BLOCK)


@triton.jit
def _split(projection, parts, K: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [BLOCK, 64] of high and low parts of the projection [24, K]."""
    k = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    j = tl.arange(0, 64)[None, :]
    x = tl.load(projection + j % 32 * K + k, mask=(j % 32 < 24) & (k < K), other=0.0)
    high = round_bf16(x).to(tl.float32)
    part = round_bf16(tl.where(j < 32, high, x - high))
    tl.store(parts + k * 64 + j, part.to(parts.dtype.element_ty), mask=k < K)


def split_projection(projection: Tensor) -> Tensor:
    """[24, K] fp32 -> [K, 64] bf16: high parts in columns 0-23, low parts in columns 32-55."""
    depth = projection.shape[1]
    parts = torch.empty((depth, 64), dtype=torch.bfloat16, device=projection.device)
    _split[(triton.cdiv(depth, 32),)](projection.contiguous(), parts, K=depth, BLOCK=32, num_warps=4)
    return parts


_splits: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_steps = 0


def _count(*_: object) -> None:
    global _steps
    _steps += 1


# Fused optimizers write to parameters without counting up their versions.
register_optimizer_step_post_hook(_count)


def split_of(projection: Tensor) -> Tensor:
    """`split_projection`, kept until the projection changes; always the same buffer."""
    version = projection._version, _steps
    known = _splits.get(projection)
    if known is None or known[0] != version:
        with torch.inference_mode(False), torch.no_grad():
            fresh = split_projection(projection)
            _splits[projection] = (version, fresh if known is None else known[1].copy_(fresh))
    return _splits[projection][1]


def refresh_projections() -> None:
    """Bring every kept split up to date: captured graphs read the buffers."""
    with torch.no_grad():
        for projection in list(_splits):
            split_of(projection)


def cut(depth: int) -> tuple[int, int]:
    """Of a sum over `depth`: elements a step, and parts, of two steps at least as in `exact_linear`."""
    step, parts = min(128, depth & -depth), 1
    while parts < 8 and depth % (2 * parts * step) == 0 and depth // parts >= 4 * step:
        parts *= 2
    return step, parts


def coefficients(
    streams: Tensor,
    squares: Tensor,
    projection: Tensor,
    base: Tensor,
    scale: Tensor,
) -> Tensor:
    """Coefficients [T, 24] fp32 of streams [T, 4, d] whose sums of squares are `squares` [T].

    `projection` comes from `split_projection`.
    """
    count = len(streams)
    depth = streams[0].numel()
    step, parts = cut(depth)
    out = torch.empty((count, 24), dtype=torch.float32, device=streams.device)
    logits = torch.empty((count, _LOGITS), dtype=torch.float32, device=streams.device)
    together = parts == 1 or count > _FEW_ROWS
    # A large tile reads the projection less often, once there is one for each processor. No tile has 16 rows,
    # which the card multiplies by other instructions.
    block, warps = (128, 8) if count >= 128 * processors(streams.device) else (64, 4)
    blocks = triton.cdiv(count, block)
    partial = logits if together else torch.empty(
        (blocks, parts, block, 64), dtype=torch.float32, device=streams.device
    )  # fmt: skip
    _coefficients[(blocks, 1 if together else parts)](
        streams,
        squares,
        projection,
        base,
        scale,
        logits,
        out,
        partial,
        logits if together else arrivals(streams.device, blocks),
        count,
        K=depth,
        BLOCK=block,
        DEPTH=step,
        PARTS=parts,
        TOGETHER=together,
        num_warps=warps,
        num_stages=4,
        **UNFUSED,
    )
    return out


def update(
    streams: Tensor,
    branch: Tensor,
    coefficient: Tensor,
    norm: Tensor,
    eps: float,
    *,
    place: Tensor | None = None,
    block: int = 2,
    warps: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Updated streams, the normalised input of the next site, and the streams' sums of squares [T].

    With `place` [T, k] int32 the branch is the sum of a token's k rows of `branch` [n, d], rounded.
    """
    count, _, width = streams.shape
    updated, normed = torch.empty_like(streams), branch.new_empty((count, width))
    squares = torch.empty(count, dtype=torch.float32, device=streams.device)
    _update[(triton.cdiv(count, block),)](
        streams,
        branch,
        branch if place is None else place,
        coefficient,
        norm,
        updated,
        normed,
        squares,
        count,
        eps,
        D=width,
        TERMS=0 if place is None else place.shape[1],
        BLOCK=block,
        CHUNK=min(1024, triton.next_power_of_2(width)),
        num_warps=warps,
        **UNFUSED,
    )
    return updated, normed, squares


def hyper_boundary(
    streams: Tensor,
    branch: Tensor,
    coefficient: Tensor,
    projection: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `model.ops.hyper_boundary.hyper_boundary`."""
    updated, normed, squares = update(
        streams.contiguous(), branch.contiguous(), coefficient.contiguous(), norm, eps
    )
    return updated, normed, coefficients(updated, squares, split_projection(projection), base, scale)
