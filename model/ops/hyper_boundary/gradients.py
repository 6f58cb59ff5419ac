"""Gradients of the boundary: one pass over the streams, and the Sinkhorn rounds run backwards.

Sinkhorn states are computed again and kept in a scratch buffer; the streams' projection is left to a matrix
product.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.hyper_boundary.triton import _coefficient
from model.ops.tile import UNFUSED, operand, round_bf16

_ROUNDS = 20


@triton.jit
def _input(streams, coefficients, norm, normed, squares, eps, D: tl.constexpr, CHUNK: tl.constexpr):
    """Input mix and norm of a site, and the streams' sum of squares, without an update."""
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, 4)
    a = tl.load(coefficients + t * 24 + s)
    length = tl.zeros((4, CHUNK), tl.float32)
    square = tl.zeros((CHUNK,), tl.float32)
    for n in tl.static_range(0, D, CHUNK):
        c = n + tl.arange(0, CHUNK)
        at = t * 4 * D + s[:, None] * D + c[None, :]
        x = tl.load(streams + at, mask=(c < D)[None, :], other=0.0).to(tl.float32)
        mix = round_bf16(tl.sum(a[:, None] * x, 0)).to(tl.float32)
        length += x * x
        square += mix * mix
    tl.store(squares + t, tl.sum(tl.sum(length, 0), 0))
    factor = tl.rsqrt(tl.sum(square, 0) * (1.0 / D) + eps)
    for n in tl.static_range(0, D, CHUNK):
        c = n + tl.arange(0, CHUNK)
        at = t * 4 * D + s[:, None] * D + c[None, :]
        x = tl.load(streams + at, mask=(c < D)[None, :], other=0.0).to(tl.float32)
        mix = round_bf16(tl.sum(a[:, None] * x, 0)).to(tl.float32)
        out = round_bf16(mix * factor * tl.load(norm + c, mask=c < D, other=0.0).to(tl.float32))
        tl.store(normed + t * D + c, out.to(normed.dtype.element_ty), mask=c < D)


def site_input(streams: Tensor, coefficient: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised input [T, d] of a site and the streams' sums of squares [T]."""
    count, _, width = streams.shape
    normed = torch.empty((count, width), dtype=streams.dtype, device=streams.device)
    squares = torch.empty(count, dtype=torch.float32, device=streams.device)
    chunk = min(1024, triton.next_power_of_2(width))
    _input[(count,)](
        streams, coefficient, norm, normed, squares, eps, D=width, CHUNK=chunk, num_warps=4, **UNFUSED
    )
    return normed, squares


@triton.jit
def _mixed(k, pick, first: tl.constexpr, step: tl.constexpr, x):
    """Sum of four tiles `x` weighted by coefficients `first`, `first + step`, ..."""
    total = _coefficient(k, pick, first) * x[0] + _coefficient(k, pick, first + step) * x[1]
    total += _coefficient(k, pick, first + 2 * step) * x[2] + _coefficient(k, pick, first + 3 * step) * x[3]
    return total


@triton.jit
def _four(source, D: tl.constexpr, keep):
    """Tiles of the four streams at `source` and D, 2 D and 3 D after it."""
    x0 = tl.load(source, mask=keep, other=0.0).to(tl.float32)
    x1 = tl.load(source + D, mask=keep, other=0.0).to(tl.float32)
    x2 = tl.load(source + 2 * D, mask=keep, other=0.0).to(tl.float32)
    x3 = tl.load(source + 3 * D, mask=keep, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def _folded(product, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Sums of 8 neighbours, which one thread holds: [BLOCK, CHUNK / 8]."""
    return tl.sum(tl.reshape(product, (BLOCK, CHUNK // 8, 8)), 2)


@triton.jit
def _site_backward(
    streams, updated, branch, coefficients, norm, grad_updated, grad_normed, grad_streams, grad_branch,
    grad_coefficients, grad_norm, count, eps, D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """Backward of update, input mix and norm; without `UPDATE` of input mix and norm alone.

    A warp holds a token, so that sums over channels stay inside it and no warp waits for another. `grad_norm`
    [T, D] are the tokens' parts of the norm's gradient.
    """
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (t < count)[:, None]
    row = t.to(tl.int64)[:, None]
    pick = tl.arange(0, 32)[None, :]
    k = tl.load(coefficients + row * 24 + pick, mask=inside & (pick < 24), other=0.0)
    square = tl.zeros((BLOCK, CHUNK), tl.float32)
    inner = tl.zeros((BLOCK, CHUNK), tl.float32)
    for n in tl.range(0, D, CHUNK):
        d = n + tl.arange(0, CHUNK)[None, :]
        keep = inside & (d < D)
        mix = _mixed(k, pick, 0, 1, _four(updated + row * (4 * D) + d, D, keep))
        g = tl.load(grad_normed + row * D + d, mask=keep, other=0.0).to(tl.float32)
        square += mix * mix
        inner += mix * g * tl.load(norm + 0 * row + d, mask=keep, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(square, 1) * (1.0 / D) + eps)[:, None]
    slope = tl.sum(inner, 1)[:, None] * factor * factor * factor * (1.0 / D)
    sums = tl.zeros((BLOCK, CHUNK // 8), tl.float32)
    grad_a = (sums, sums, sums, sums)
    grad_c = (sums, sums, sums, sums)
    grad_m0 = (sums, sums, sums, sums)
    grad_m1 = (sums, sums, sums, sums)
    grad_m2 = (sums, sums, sums, sums)
    grad_m3 = (sums, sums, sums, sums)
    for n in tl.range(0, D, CHUNK):
        d = n + tl.arange(0, CHUNK)[None, :]
        keep = inside & (d < D)
        at = row * (4 * D) + d
        x = _four(updated + at, D, keep)
        mix = _mixed(k, pick, 0, 1, x)
        g = tl.load(grad_normed + row * D + d, mask=keep, other=0.0).to(tl.float32)
        _store(grad_norm + row * D + d, g * mix * factor, keep)
        # One row a token, so that it is laid out as the rest.
        weight = tl.load(norm + 0 * row + d, mask=keep, other=0.0).to(tl.float32)
        grad_mix = g * weight * factor - mix * slope
        grad_a = _added(grad_a, x, grad_mix, BLOCK, CHUNK)
        z0 = _coefficient(k, pick, 0) * grad_mix
        z1 = _coefficient(k, pick, 1) * grad_mix
        z2 = _coefficient(k, pick, 2) * grad_mix
        z3 = _coefficient(k, pick, 3) * grad_mix
        if UPDATE:
            u = _four(grad_updated + at, D, keep)
            z = (u[0] + z0, u[1] + z1, u[2] + z2, u[3] + z3)
            grad_c = _added(
                grad_c, z, tl.load(branch + row * D + d, mask=keep, other=0.0).to(tl.float32), BLOCK, CHUNK
            )
            old = _four(streams + at, D, keep)
            grad_m0 = _added(grad_m0, z, old[0], BLOCK, CHUNK)
            grad_m1 = _added(grad_m1, z, old[1], BLOCK, CHUNK)
            grad_m2 = _added(grad_m2, z, old[2], BLOCK, CHUNK)
            grad_m3 = _added(grad_m3, z, old[3], BLOCK, CHUNK)
            _store(grad_branch + row * D + d, _mixed(k, pick, 4, 1, z), keep)
            z0 = _mixed(k, pick, 8, 1, z)
            z1 = _mixed(k, pick, 12, 1, z)
            z2 = _mixed(k, pick, 16, 1, z)
            z3 = _mixed(k, pick, 20, 1, z)
        _store(grad_streams + at, z0, keep)
        _store(grad_streams + at + D, z1, keep)
        _store(grad_streams + at + 2 * D, z2, keep)
        _store(grad_streams + at + 3 * D, z3, keep)
    out = grad_coefficients + t.to(tl.int64) * 24
    _store_sums(out, grad_a, t < count)
    if UPDATE:
        _store_sums(out + 4, grad_c, t < count)
        _store_sums(out + 8, grad_m0, t < count)
        _store_sums(out + 12, grad_m1, t < count)
        _store_sums(out + 16, grad_m2, t < count)
        _store_sums(out + 20, grad_m3, t < count)


@triton.jit
def _added(sums, x, y, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """`sums` of four tiles `x` times `y`, continued."""
    s0 = sums[0] + _folded(x[0] * y, BLOCK, CHUNK)
    s1 = sums[1] + _folded(x[1] * y, BLOCK, CHUNK)
    s2 = sums[2] + _folded(x[2] * y, BLOCK, CHUNK)
    s3 = sums[3] + _folded(x[3] * y, BLOCK, CHUNK)
    return s0, s1, s2, s3


@triton.jit
def _store_sums(out, sums, inside):
    for i in tl.static_range(4):
        tl.store(out + i, tl.sum(sums[i], 1), mask=inside)


@triton.jit
def _store(place, x, keep):
    tl.store(place, round_bf16(x).to(place.dtype.element_ty), mask=keep)


def site_backward(
    streams: Tensor | None,
    updated: Tensor,
    branch: Tensor | None,
    coefficient: Tensor,
    norm: Tensor,
    eps: float,
    grad_updated: Tensor | None,
    grad_normed: Tensor,
    *,
    block: int = 4,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of streams, branch, coefficients [T, 24] and norm.

    Without `streams`, `branch` and `grad_updated` there was no update: the input mix of `updated` alone.
    """
    count, _, width = updated.shape
    grad_streams = torch.empty_like(updated)
    grad_branch = None if branch is None else torch.empty_like(branch)
    make = torch.zeros if streams is None else torch.empty
    grad_coefficients = make((count, 24), dtype=torch.float32, device=updated.device)
    # Rounded parts are enough: their sum is rounded to the same bits, and a thousand roundings cancel out.
    grad_norm = torch.empty((count, width), dtype=norm.dtype, device=updated.device)
    _site_backward[(triton.cdiv(count, block),)](
        updated if streams is None else streams, updated, updated if branch is None else branch, coefficient,
        norm, updated if grad_updated is None else grad_updated.contiguous(), grad_normed.contiguous(),
        grad_streams, updated if grad_branch is None else grad_branch, grad_coefficients, grad_norm, count,
        eps, D=width, BLOCK=block, CHUNK=min(256, triton.next_power_of_2(width)),
        UPDATE=streams is not None, num_warps=block,
    )  # fmt: skip
    return grad_streams, grad_branch, grad_coefficients, grad_norm.sum(0)


@triton.jit
def _logit_gradients(
    products, squares, base, scale, grad, raw, shrink, totals, states, sums, count, K: tl.constexpr,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From gradients of the coefficients [T, 24] to those of the streams' projection.

    `products` [T, 64] are the streams times both parts of the projection. `raw` [T, 32] is the gradient of
    the projection and `shrink` [T] what the streams' own length takes away; `totals` [programs, 2, 24] hold
    each program's sums of the gradients of moved logits, and of these times the logits.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = (t < count)[:, None]
    inverse = tl.rsqrt(tl.load(squares + t, mask=t < count, other=1.0) * (1.0 / K) + 1e-20)
    j = tl.arange(0, 8)[None, :]
    at = products + t[:, None] * 64 + j
    gates = tl.load(at, mask=keep, other=0.0) + tl.load(at + 32, mask=keep, other=0.0)
    gates = gates * inverse[:, None]
    factor = tl.load(scale + j // 4)
    gate = 1.0 / (1.0 + tl.exp(-(gates * factor + tl.load(base + j))))
    g = tl.load(grad + t[:, None] * 24 + j, mask=keep, other=0.0)
    g = g * gate * (1.0 - gate) * tl.where(j < 4, 1.0, 2.0)
    length = tl.sum(g * factor * gates, 1)
    place = raw + t[:, None] * 32 + j
    tl.store(place, round_bf16(g * factor * inverse[:, None]).to(raw.dtype.element_ty), mask=keep)
    tl.store(place + 24, tl.zeros((BLOCK, 8), raw.dtype.element_ty), mask=keep)
    total = totals + tl.program_id(0) * 48 + tl.arange(0, 8)
    tl.store(total, tl.sum(g, 0))
    tl.store(total + 24, tl.sum(g * gates, 0))

    q = tl.arange(0, 4)
    entry = q[None, :, None] * 4 + q[None, None, :]
    row = t[:, None, None]
    inside = row < count
    one = tl.load(scale + 2)
    at3 = products + row * 64 + 8 + entry
    comb = tl.load(at3, mask=inside, other=0.0) + tl.load(at3 + 32, mask=inside, other=0.0)
    comb = comb * inverse[:, None, None]
    z = comb * one + tl.load(base + 8 + entry)
    z = tl.exp(z - tl.max(z, 2)[:, :, None])
    soft = z / tl.sum(z, 2)[:, :, None]
    state = states + row * 16 + entry
    line = sums + t[:, None] * 4 + q[None, :]
    # A count of 1 is a constant to the compiler and has no methods.
    step = tl.full((), 16, tl.int64) * count
    short = tl.full((), 4, tl.int64) * count
    divisor = tl.sum(soft + 1e-6, 1) + 1e-6
    mix = (soft + 1e-6) / divisor[:, None, :]
    tl.store(state, mix, mask=inside)
    tl.store(line, divisor, mask=keep)
    for r in tl.range(0, ROUNDS - 1):
        divisor = tl.sum(mix, 2) + 1e-6
        mix = mix / divisor[:, :, None]
        tl.store(state + (2 * r + 1) * step, mix, mask=inside)
        tl.store(line + (2 * r + 1) * short, divisor, mask=keep)
        divisor = tl.sum(mix, 1) + 1e-6
        mix = mix / divisor[:, None, :]
        tl.store(state + (2 * r + 2) * step, mix, mask=inside)
        tl.store(line + (2 * r + 2) * short, divisor, mask=keep)
    tl.debug_barrier()
    g3 = tl.load(grad + row * 24 + 8 + entry, mask=inside, other=0.0)
    for r in tl.range(0, ROUNDS - 1):
        back = 2 * (ROUNDS - 1 - r)
        mix = tl.load(state + back * step, mask=inside, other=1.0)
        divisor = tl.load(line + back * short, mask=keep, other=1.0)
        g3 = (g3 - tl.sum(g3 * mix, 1)[:, None, :]) / divisor[:, None, :]
        mix = tl.load(state + (back - 1) * step, mask=inside, other=1.0)
        divisor = tl.load(line + (back - 1) * short, mask=keep, other=1.0)
        g3 = (g3 - tl.sum(g3 * mix, 2)[:, :, None]) / divisor[:, :, None]
    mix = tl.load(state, mask=inside, other=1.0)
    divisor = tl.load(line, mask=keep, other=1.0)
    g3 = (g3 - tl.sum(g3 * mix, 1)[:, None, :]) / divisor[:, None, :]
    g3 = soft * (g3 - tl.sum(g3 * soft, 2)[:, :, None])
    length += tl.sum(tl.sum(g3 * one * comb, 2), 1)
    tl.store(
        raw + row * 32 + 8 + entry,
        round_bf16(g3 * one * inverse[:, None, None]).to(raw.dtype.element_ty),
        mask=inside,
    )
    total3 = totals + tl.program_id(0) * 48 + 8 + q[:, None] * 4 + q[None, :]
    tl.store(total3, tl.sum(g3, 0))
    tl.store(total3 + 24, tl.sum(g3 * comb, 0))
    tl.store(shrink + t, -length * inverse * inverse * (1.0 / K), mask=t < count)


@triton.jit
def _sum_totals(totals, grad_base, grad_scale, programs, BLOCK: tl.constexpr):
    """Gradients of base [24] and scale [3] from the programs' `totals` [programs, 2, 24]."""
    j = tl.arange(0, 32)[None, :]
    of_base = tl.zeros((BLOCK, 32), tl.float32)
    of_scale = tl.zeros((BLOCK, 32), tl.float32)
    for p in tl.range(0, programs, BLOCK):
        row = p + tl.arange(0, BLOCK)[:, None]
        keep = (row < programs) & (j < 24)
        of_base += tl.load(totals + row * 48 + j, mask=keep, other=0.0)
        of_scale += tl.load(totals + row * 48 + 24 + j, mask=keep, other=0.0)
    c = tl.arange(0, 32)
    tl.store(grad_base + c, tl.sum(of_base, 0), mask=c < 24)
    whole = tl.sum(of_scale, 0)
    part = tl.minimum(c // 4, 2)
    for i in tl.static_range(3):
        tl.store(grad_scale + i, tl.sum(tl.where(part == i, whole, 0.0), 0))


def logit_gradients(
    products: Tensor, squares: Tensor, base: Tensor, scale: Tensor, grad: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients through gates and Sinkhorn rounds.

    Args:
        products: [T, 64] fp32, streams times both parts of the split projection.
        squares: [T] fp32 of the streams.
        base: [24] fp32.
        scale: [3] fp32.
        grad: [T, 24] fp32 of the coefficients.
        width: 4 d, elements of a token's streams.

    Returns:
        Gradient of the projected streams [T, 32] bf16 (24 used, the rest zero), the factor [T] fp32 by which
        the streams themselves enter their gradient, and gradients of base and scale.
    """
    count, block, new = len(products), 16, products.new_empty
    states, sums = new((2 * _ROUNDS - 1, count, 16)), new((2 * _ROUNDS - 1, count, 4))
    raw, shrink = new((count, 32), dtype=torch.bfloat16), new(count)
    programs = triton.cdiv(count, block)
    totals, grad_base, grad_scale = new((programs, 2, 24)), new(24), new(3)
    _logit_gradients[(programs,)](
        products, squares, base, scale, grad, raw, shrink, totals, states, sums, count, K=width,
        ROUNDS=_ROUNDS, BLOCK=block, num_warps=1,
    )  # fmt: skip
    _sum_totals[(1,)](totals, grad_base, grad_scale, programs, BLOCK=64, num_warps=8)
    return raw, shrink, grad_base, grad_scale


@triton.jit
def _stream_gradients(
    streams, raw, shrink, projection, grad, out, count, K: tl.constexpr, HAS_GRAD: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`out` = `grad` + `raw` times the projection + `shrink` times the streams, each [T, K]."""
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    keep = (t < count)[:, None] & (c < K)[None, :]
    row = t.to(tl.int64)[:, None]
    j = tl.arange(0, 32)
    left = operand(tl.load(raw + row * 32 + j[None, :], mask=(t < count)[:, None], other=0.0))
    right = operand(tl.load(projection + c[None, :] * 64 + j[:, None], mask=(c < K)[None, :], other=0.0))
    x = tl.load(streams + row * K + c[None, :], mask=keep, other=0.0).to(tl.float32)
    total = x * tl.load(shrink + t, mask=t < count, other=0.0)[:, None]
    if HAS_GRAD:
        total += tl.load(grad + row * K + c[None, :], mask=keep, other=0.0).to(tl.float32)
    total += tl.dot(left, right)
    _store(out + row * K + c[None, :], total, keep)


def stream_gradients(
    streams: Tensor, raw: Tensor, shrink: Tensor, projection: Tensor, grad: Tensor | None
) -> Tensor:
    """Gradient of streams [T, 4, d] through their projection and their length, added to `grad`.

    `raw` and `shrink` come from `logit_gradients`, `projection` [4 d, 64] from `split_projection`.
    """
    count, depth = len(streams), streams[0].numel()
    out = torch.empty_like(streams)
    block, chunk = 64, min(128, triton.next_power_of_2(depth))
    _stream_gradients[(triton.cdiv(depth, chunk), triton.cdiv(count, block))](
        streams, raw, shrink, projection, streams if grad is None else grad.contiguous(), out, count, K=depth,
        HAS_GRAD=grad is not None, BLOCK=block, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    return out
