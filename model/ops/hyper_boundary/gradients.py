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

from model.ops.tile import round_bf16

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
    _input[(count,)](streams, coefficient, norm, normed, squares, eps, D=width, CHUNK=chunk, num_warps=4)
    return normed, squares


@triton.jit
def _site_backward(
    streams, updated, branch, coefficients, norm, grad_updated, grad_normed, grad_streams, grad_branch,
    grad_coefficients, grad_norm, eps, D: tl.constexpr, CHUNK: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Backward of update, input mix and norm; without `UPDATE` of input mix and norm alone."""
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, 4)
    a = tl.load(coefficients + t * 24 + s)
    square = tl.zeros((CHUNK,), tl.float32)
    inner = tl.zeros((CHUNK,), tl.float32)
    for n in tl.range(0, D, CHUNK):
        c = n + tl.arange(0, CHUNK)
        x = tl.load(updated + t * 4 * D + s[:, None] * D + c[None, :], mask=(c < D)[None, :], other=0.0).to(
            tl.float32
        )
        mix = tl.sum(a[:, None] * x, 0)
        g = tl.load(grad_normed + t * D + c, mask=c < D, other=0.0).to(tl.float32)
        square += mix * mix
        inner += mix * g * tl.load(norm + c, mask=c < D, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(square, 0) * (1.0 / D) + eps)
    slope = tl.sum(inner, 0) * factor * factor * factor * (1.0 / D)
    grad_a = tl.zeros((4, CHUNK), tl.float32)
    grad_c = tl.zeros((4, CHUNK), tl.float32)
    grad_m = tl.zeros((4, 4, CHUNK), tl.float32)
    write = tl.load(coefficients + t * 24 + 4 + s)
    pair = s[:, None] * 4 + s[None, :]
    carry = tl.load(coefficients + t * 24 + 8 + pair)
    for n in tl.range(0, D, CHUNK):
        c = n + tl.arange(0, CHUNK)
        keep = (c < D)[None, :]
        at = t * 4 * D + s[:, None] * D + c[None, :]
        x = tl.load(updated + at, mask=keep, other=0.0).to(tl.float32)
        mix = tl.sum(a[:, None] * x, 0)
        g = tl.load(grad_normed + t * D + c, mask=c < D, other=0.0).to(tl.float32)
        tl.store(grad_norm + t * D + c, g * mix * factor, mask=c < D)
        weight = tl.load(norm + c, mask=c < D, other=0.0).to(tl.float32)
        grad_mix = g * weight * factor - mix * slope
        grad_a += x * grad_mix[None, :]
        total = tl.load(grad_updated + at, mask=keep, other=0.0).to(tl.float32)
        total += a[:, None] * grad_mix[None, :]
        if UPDATE:
            y = tl.load(branch + t * D + c, mask=c < D, other=0.0).to(tl.float32)
            old = tl.load(streams + at, mask=keep, other=0.0).to(tl.float32)
            grad_c += total * y[None, :]
            grad_m += old[:, None, :] * total[None, :, :]
            grad_y = tl.sum(write[:, None] * total, 0)
            tl.store(grad_branch + t * D + c, round_bf16(grad_y).to(grad_branch.dtype.element_ty), mask=c < D)
            total = tl.sum(carry[:, :, None] * total[None, :, :], 1)
        tl.store(grad_streams + at, round_bf16(total).to(grad_streams.dtype.element_ty), mask=keep)
    tl.store(grad_coefficients + t * 24 + s, tl.sum(grad_a, 1))
    if UPDATE:
        tl.store(grad_coefficients + t * 24 + 4 + s, tl.sum(grad_c, 1))
        tl.store(grad_coefficients + t * 24 + 8 + pair, tl.sum(grad_m, 2))


def site_backward(
    streams: Tensor | None,
    updated: Tensor,
    branch: Tensor | None,
    coefficient: Tensor,
    norm: Tensor,
    eps: float,
    grad_updated: Tensor,
    grad_normed: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of streams, branch, coefficients [T, 24] and norm; without `streams` there was no update."""
    count, _, width = updated.shape
    grad_streams = torch.empty_like(updated)
    grad_branch = None if branch is None else torch.empty_like(branch)
    grad_coefficients = torch.zeros((count, 24), dtype=torch.float32, device=updated.device)
    grad_norm = torch.empty((count, width), dtype=torch.float32, device=updated.device)
    _site_backward[(count,)](
        updated if streams is None else streams, updated, updated if branch is None else branch, coefficient,
        norm, grad_updated.contiguous(), grad_normed.contiguous(), grad_streams,
        updated if grad_branch is None else grad_branch, grad_coefficients, grad_norm, eps, D=width,
        CHUNK=min(512, triton.next_power_of_2(width)), UPDATE=streams is not None, num_warps=4,
    )  # fmt: skip
    return grad_streams, grad_branch, grad_coefficients, grad_norm.sum(0).to(norm.dtype)


@triton.jit
def _logit_gradients(
    logits, base, scale, grad, out, states, sums, count, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    """`logits` [T, 24] before scale and base; `out` [T, 24] the gradient of scaled and shifted ones."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = (t < count)[:, None]
    j = tl.arange(0, 8)[None, :]
    factor = tl.load(scale + j // 4)
    m = tl.load(logits + t[:, None] * 24 + j, mask=keep, other=0.0) * factor + tl.load(base + j)
    gate = 1.0 / (1.0 + tl.exp(-m))
    g = tl.load(grad + t[:, None] * 24 + j, mask=keep, other=0.0)
    tl.store(out + t[:, None] * 24 + j, g * gate * (1.0 - gate) * tl.where(j < 4, 1.0, 2.0), mask=keep)

    q = tl.arange(0, 4)
    entry = q[None, :, None] * 4 + q[None, None, :]
    row = t[:, None, None]
    inside = row < count
    one = tl.load(scale + 2)
    z = tl.load(logits + row * 24 + 8 + entry, mask=inside, other=0.0) * one + tl.load(base + 8 + entry)
    z = tl.exp(z - tl.max(z, 2)[:, :, None])
    soft = z / tl.sum(z, 2)[:, :, None]
    place = states + row * 16 + entry
    line = sums + t[:, None] * 4 + q[None, :]
    step = count.to(tl.int64) * 16
    short = count.to(tl.int64) * 4
    total = tl.sum(soft + 1e-6, 1) + 1e-6
    mix = (soft + 1e-6) / total[:, None, :]
    tl.store(place, mix, mask=inside)
    tl.store(line, total, mask=keep)
    for r in tl.range(0, ROUNDS - 1):
        total = tl.sum(mix, 2) + 1e-6
        mix = mix / total[:, :, None]
        tl.store(place + (2 * r + 1) * step, mix, mask=inside)
        tl.store(line + (2 * r + 1) * short, total, mask=keep)
        total = tl.sum(mix, 1) + 1e-6
        mix = mix / total[:, None, :]
        tl.store(place + (2 * r + 2) * step, mix, mask=inside)
        tl.store(line + (2 * r + 2) * short, total, mask=keep)
    tl.debug_barrier()
    g3 = tl.load(grad + row * 24 + 8 + entry, mask=inside, other=0.0)
    for r in tl.range(0, ROUNDS - 1):
        at = 2 * (ROUNDS - 1 - r)
        mix = tl.load(place + at * step, mask=inside, other=1.0)
        total = tl.load(line + at * short, mask=keep, other=1.0)
        g3 = (g3 - tl.sum(g3 * mix, 1)[:, None, :]) / total[:, None, :]
        mix = tl.load(place + (at - 1) * step, mask=inside, other=1.0)
        total = tl.load(line + (at - 1) * short, mask=keep, other=1.0)
        g3 = (g3 - tl.sum(g3 * mix, 2)[:, :, None]) / total[:, :, None]
    mix = tl.load(place, mask=inside, other=1.0)
    total = tl.load(line, mask=keep, other=1.0)
    g3 = (g3 - tl.sum(g3 * mix, 1)[:, None, :]) / total[:, None, :]
    g3 = soft * (g3 - tl.sum(g3 * soft, 2)[:, :, None])
    tl.store(out + row * 24 + 8 + entry, g3, mask=inside)


def logit_gradients(logits: Tensor, base: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
    """From gradients of the coefficients [T, 24] to those of `logits * scale + base` [T, 24]."""
    count, block = len(logits), 32
    states = torch.empty((2 * _ROUNDS - 1, count, 16), dtype=torch.float32, device=logits.device)
    sums = torch.empty((2 * _ROUNDS - 1, count, 4), dtype=torch.float32, device=logits.device)
    out = torch.empty_like(logits)
    _logit_gradients[(triton.cdiv(count, block),)](
        logits, base, scale, grad, out, states, sums, count, ROUNDS=_ROUNDS, BLOCK=block, num_warps=1
    )
    return out
