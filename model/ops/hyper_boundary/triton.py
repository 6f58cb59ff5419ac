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

from model.ops.tile import operand, round_bf16

_LOGITS = 32
# With no more rows than these, the parts of a projection's sum are programs of their own.
_FEW_ROWS = 512


@triton.jit
def _update(
    streams,
    branch,
    coefficients,
    norm,
    updated,
    normed,
    squares,
    count,
    eps,
    D: tl.constexpr,
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
        y = tl.load(branch + row * D + d, mask=keep, other=0.0).to(tl.float32)
        x = streams + row * (4 * D) + d
        x0 = tl.load(x, mask=keep, other=0.0).to(tl.float32)
        x1 = tl.load(x + D, mask=keep, other=0.0).to(tl.float32)
        x2 = tl.load(x + 2 * D, mask=keep, other=0.0).to(tl.float32)
        x3 = tl.load(x + 3 * D, mask=keep, other=0.0).to(tl.float32)
        mix = tl.zeros((BLOCK, CHUNK), tl.float32)
        for o in tl.static_range(4):
            z = _coefficient(k, pick, 4 + o) * y
            z += _coefficient(k, pick, 8 + o) * x0 + _coefficient(k, pick, 12 + o) * x1
            z += _coefficient(k, pick, 16 + o) * x2 + _coefficient(k, pick, 20 + o) * x3
            z = round_bf16(z)
            tl.store(updated + row * (4 * D) + o * D + d, z.to(updated.dtype.element_ty), mask=keep)
            length += z.to(tl.float32) * z.to(tl.float32)
            mix += _coefficient(k, pick, o) * z.to(tl.float32)
        mix = round_bf16(mix)
        mixes = mixes + (mix,)  # noqa: RUF005
        square += mix.to(tl.float32) * mix.to(tl.float32)
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
def _finish(acc, square, base, scale, logits, out, t, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """Gates and Sinkhorn rounds from the projection [BLOCK, 64] of streams with sums of squares `square`."""
    m = tl.sum(tl.reshape(acc, (BLOCK, 2, 32)), 1) * tl.rsqrt(square * (1.0 / K) + 1e-20)[:, None]
    j = tl.arange(0, 32)[None, :]
    factor = tl.load(scale + tl.minimum(j // 4, 2))
    m = m * factor + tl.load(base + j, mask=j < 24, other=0.0)
    gate = _sigmoid(m)
    gate = tl.where(j < 4, gate + 1e-6, 2.0 * gate)
    keep = (t < count)[:, None]
    tl.store(out + t.to(tl.int64)[:, None] * 24 + j, gate, mask=keep & (j < 8))
    tl.store(logits + t.to(tl.int64)[:, None] * 32 + j, m, mask=keep)
    tl.debug_barrier()
    entry = tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    t3 = t.to(tl.int64)[:, None, None]
    inside = t3 < count
    mix = tl.load(logits + t3 * 32 + 8 + entry, mask=inside, other=0.0)
    mix = tl.exp(mix - tl.max(mix, 2)[:, :, None])
    mix = mix / tl.sum(mix, 2)[:, :, None] + 1e-6
    mix = mix / (tl.sum(mix, 1)[:, None, :] + 1e-6)
    for _ in tl.range(0, 19):
        mix = mix / (tl.sum(mix, 2)[:, :, None] + 1e-6)
        mix = mix / (tl.sum(mix, 1)[:, None, :] + 1e-6)
    tl.store(out + t3 * 24 + 8 + entry, mix, mask=inside)


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
    """Projection, then gates and Sinkhorn rounds.

    Columns 0-31 and 32-63 of the projection are the high and low parts of the weight. The sum over K is cut
    into PARTS, which with few rows are programs of their own: the last to arrive adds them up in order.

    The sums of squares come from the caller: Triton 3.6 races when a pipelined operand of a dot is used in
    other arithmetic too, and a second load would not be pipelined.
    """
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.minimum(t, count - 1).to(tl.int64)[:, None]
    n = tl.arange(0, 64)[None, :]
    PART: tl.constexpr = K // PARTS
    total = tl.zeros((BLOCK, 64), tl.float32)
    first = tl.program_id(1)
    for p in tl.range(first, (PARTS if TOGETHER else first + 1)):
        acc = tl.zeros((BLOCK, 64), tl.float32)
        for k in tl.range(0, PART, DEPTH):
            c = p * PART + k + tl.arange(0, DEPTH)
            x = operand(tl.load(streams + row * K + c[None, :]))
            acc = tl.dot(x, operand(tl.load(projection + c[:, None] * 64 + n)), acc)
        total += acc
    square = tl.load(squares + t, mask=t < count, other=1.0)
    if TOGETHER:
        _finish(total, square, base, scale, logits, out, t, count, K, BLOCK)
    else:
        at = tl.program_id(0).to(tl.int64) * (PARTS * BLOCK * 64)
        tile = at + tl.arange(0, BLOCK)[:, None] * 64 + n
        tl.store(partial + tile + first * (BLOCK * 64), total)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tl.program_id(0), 1)
        if arrived == PARTS - 1:
            total = tl.zeros((BLOCK, 64), tl.float32)
            for p in tl.range(0, PARTS):
                total += tl.load(partial + tile + p * (BLOCK * 64), cache_modifier=".cg")
            tl.store(counters + tl.program_id(0), 0)
            _finish(total, square, base, scale, logits, out, t, count, K, BLOCK)


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


def coefficients(streams: Tensor, squares: Tensor, projection: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    """Coefficients [T, 24] fp32 of streams [T, 4, d] whose sums of squares are `squares` [T].

    `projection` comes from `split_projection`.
    """
    count = len(streams)
    depth = streams[0].numel()
    step = min(128, depth & -depth)
    parts = 1
    while parts < 8 and depth % (2 * parts * step) == 0:
        parts *= 2
    out = torch.empty((count, 24), dtype=torch.float32, device=streams.device)
    logits = torch.empty((count, _LOGITS), dtype=torch.float32, device=streams.device)
    block = 64
    blocks = triton.cdiv(count, block)
    together = parts == 1 or count > _FEW_ROWS
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
        logits if together else _counters(streams.device),
        count,
        K=depth,
        BLOCK=block,
        DEPTH=step,
        PARTS=parts,
        TOGETHER=together,
        num_warps=4,
        num_stages=4,
    )
    return out


_arrivals: dict[torch.device, Tensor] = {}


def _counters(device: torch.device) -> Tensor:
    """Zeros that a kernel counts in and leaves zero: one a device, as kernels of a stream take turns."""
    if device not in _arrivals:
        _arrivals[device] = torch.zeros(_FEW_ROWS, dtype=torch.int32, device=device)
    return _arrivals[device]


def update(
    streams: Tensor,
    branch: Tensor,
    coefficient: Tensor,
    norm: Tensor,
    eps: float,
    *,
    block: int = 2,
    warps: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Updated streams, the normalised input of the next site, and the streams' sums of squares [T]."""
    count, _, width = streams.shape
    updated, normed = torch.empty_like(streams), torch.empty_like(branch)
    squares = torch.empty(count, dtype=torch.float32, device=streams.device)
    _update[(triton.cdiv(count, block),)](
        streams,
        branch,
        coefficient,
        norm,
        updated,
        normed,
        squares,
        count,
        eps,
        D=width,
        BLOCK=block,
        CHUNK=min(1024, triton.next_power_of_2(width)),
        num_warps=warps,
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
