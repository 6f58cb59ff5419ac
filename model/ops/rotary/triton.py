"""Rotations in place, and sliding-window keys in one pass from projection to record."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.records import record_bytes
from model.ops.tile import UNFUSED, e2m1_code, e4m3_code, e4m3_value, round_bf16, ue8m0_code


@triton.jit
def _rotary(x, cosine, sine, sign, heads, D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, R // 2)
    at = x + (t * heads + h)[:, None] * D + (D - R) + tl.arange(0, R)[None, :]
    keep = (h < heads)[:, None]
    even, odd = tl.split(tl.reshape(tl.load(at, mask=keep, other=0.0).to(tl.float32), (BLOCK, R // 2, 2)))
    cos = tl.load(cosine + t * (R // 2) + j)[None, :]
    sin = tl.load(sine + t * (R // 2) + j)[None, :] * sign
    turned = tl.join(tl.fma(even, cos, -(odd * sin)), tl.fma(odd, cos, even * sin))
    turned = round_bf16(tl.reshape(turned, (BLOCK, R)))
    tl.store(at, turned.to(x.dtype.element_ty), mask=keep)


def rotary_(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    """Rotate the last channels of contiguous `x` [T, (H,) D] in place; `sign` -1 turns back."""
    assert x.is_contiguous()
    heads = x.shape[1] if x.dim() == 3 else 1
    block = min(16, triton.next_power_of_2(heads))
    _rotary[(len(x), triton.cdiv(heads, block))](
        x, cosine, sine, sign, heads, D=x.shape[-1], R=2 * cosine.shape[1], BLOCK=block, num_warps=1,
        **UNFUSED,
    )  # fmt: skip
    return x


@triton.jit
def _turned_gradient(
    x, grad, cosine, sine, lost, heads, D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, R // 2)
    keep = (h < heads)[:, None]
    at = (t * heads + h)[:, None] * D + (D - R) + tl.arange(0, R)[None, :]
    before = tl.load(grad + at, mask=keep, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(before, (BLOCK, R // 2, 2)))
    cos = tl.load(cosine + t * (R // 2) + j)[None, :]
    sin = tl.load(sine + t * (R // 2) + j)[None, :]
    after = round_bf16(tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (BLOCK, R)))
    own = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(lost + t * heads + h, tl.sum(own * (before - after.to(tl.float32)), 1), mask=h < heads)
    tl.store(grad + at, after.to(grad.dtype.element_ty), mask=keep)


def turned_gradient_(x: Tensor, grad: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate `grad` [T, H, D] in place; [T, H] fp32 by how much its products with `x` of each head fell.

    Both before the rotation or both after have the same products; here only one of the two is turned.
    """
    assert x.is_contiguous() and grad.is_contiguous()
    count, heads, width = x.shape
    block = min(16, triton.next_power_of_2(heads))
    lost = torch.empty((count, heads), dtype=torch.float32, device=x.device)
    _turned_gradient[(count, triton.cdiv(heads, block))](
        x, grad, cosine, sine, lost, heads, D=width, R=2 * cosine.shape[1], BLOCK=block, num_warps=1
    )
    return lost


@triton.jit
def _angles(cosine, sine, at, c, here, D: tl.constexpr, R: tl.constexpr):
    """Cosine and sine for channels `c`, those `here` of the last R of D from `at` on; 1 and 0 elsewhere."""
    pair = at + (c - (D - R)) // 2
    return tl.load(cosine + pair, mask=here, other=1.0), tl.load(sine + pair, mask=here, other=0.0)


@triton.jit
def _turned(x, partner, cosine, sine, at, c, here, D: tl.constexpr, R: tl.constexpr):
    """Channels `c` in fp32 with the last R of D turned in adjacent pairs, of which `partner` is the other."""
    cos, sin = _angles(cosine, sine, at, c, here, D, R)
    return round_bf16(tl.fma(x, cos, tl.where(c % 2 == 0, -partner, partner) * sin))


@triton.jit
def _normed(values, norm, at, c, factor, keep):
    x = tl.load(values + at + c, mask=keep, other=0.0).to(tl.float32)
    return round_bf16(x * factor * tl.load(norm + c, mask=keep, other=0.0).to(tl.float32)).to(tl.float32)


@triton.jit
def _window(
    values, norm, cosine, sine, keys, ring, target, stride, key_stride, eps,
    D: tl.constexpr, R: tl.constexpr, ROUND: tl.constexpr, WRITE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    window_row(
        t, values, norm, cosine, sine, keys, ring, target, stride, key_stride, eps, D, R, ROUND, WRITE, BYTES
    )


@triton.jit
def window_row(
    t, values, norm, cosine, sine, keys, ring, target, stride, key_stride, eps,
    D: tl.constexpr, R: tl.constexpr, ROUND: tl.constexpr, WRITE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """The window key of token `t` and its record."""
    c = tl.arange(0, D)
    everywhere = c < D
    x = tl.load(values + t * stride + c).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) * (1.0 / D) + eps)
    x = _normed(values, norm, t * stride, c, factor, everywhere)
    turned = c >= D - R
    partner = _normed(values, norm, t * stride, c ^ 1, factor, turned)
    x = _turned(x, partner, cosine, sine, t * (R // 2), c, turned, D, R).to(tl.float32)
    grouped = tl.reshape(x, (D // 32, 32))
    code, scale = ue8m0_code(tl.max(tl.abs(grouped), 1), 1e-4, 448.0)
    scale = tl.broadcast_to(scale[:, None], (D // 32, 32))
    value = e4m3_code(tl.reshape(tl.math.div_rn(grouped, scale), (D,)))
    if ROUND:
        size = e4m3_value(value & 0x7F)
        x = tl.where((value & 0x80) != 0, -size, size) * tl.reshape(scale, (D,))
    tl.store(keys + t * key_stride + c, round_bf16(x).to(keys.dtype.element_ty))
    if WRITE:
        row = tl.load(target + t).to(tl.int64)
        if row >= 0:
            tl.store(ring + row * BYTES + c, value.to(tl.uint8))
            tl.store(ring + row * BYTES + D + tl.arange(0, D // 32), code.to(tl.uint8))


def window_keys(
    values: Tensor,
    norm: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    eps: float,
    rounded: bool,
    ring: Tensor | None = None,
    target: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Keys [T, D]; with `ring` [rows, bytes] also their records at rows `target` [T] (negative: nowhere)."""
    count, width = values.shape
    keys = torch.empty((count, width), dtype=values.dtype, device=values.device) if out is None else out
    assert values.stride(1) == 1 and keys.stride(1) == 1
    assert ring is None or (ring.is_contiguous() and ring.shape[-1] == record_bytes("window", width))
    _window[(count,)](
        values, norm, cosine, sine, keys, values if ring is None else ring,
        values if target is None else target, values.stride(0), keys.stride(0), eps,
        D=width, R=2 * cosine.shape[1], ROUND=rounded, WRITE=ring is not None,
        BYTES=record_bytes("window", width), num_warps=4, **UNFUSED,
    )  # fmt: skip
    return keys


@triton.jit
def _window_backward(
    values, norm, cosine, sine, grad, grad_values, grad_norm, count, stride, grad_stride, eps,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Back through rotation and norm; each program leaves its rows' sum of the norm's gradient."""
    t = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    c = tl.arange(0, D)[None, :]
    keep = (t < count) & (c < D)
    turned = keep & (c >= D - R)
    x = tl.load(values + t * stride + c, mask=keep, other=0.0).to(tl.float32)
    g = tl.load(grad + t * grad_stride + c, mask=keep, other=0.0).to(tl.float32)
    partner = tl.load(grad + t * grad_stride + (c ^ 1), mask=turned, other=0.0).to(tl.float32)
    cos, sin = _angles(cosine, sine, t * (R // 2), c, turned, D, R)
    g = g * cos + tl.where(c % 2 == 0, partner, -partner) * sin
    factor = tl.rsqrt(tl.sum(x * x, 1) * (1.0 / D) + eps)[:, None]
    normed = x * factor
    weighed = g * tl.load(norm + 0 * t + c, mask=keep, other=0.0).to(tl.float32)
    inner = tl.sum(weighed * normed, 1)[:, None] * (1.0 / D)
    out = round_bf16((weighed - normed * inner) * factor)
    tl.store(grad_values + t * D + c, out.to(grad_values.dtype.element_ty), mask=keep)
    tl.store(grad_norm + tl.program_id(0) * D + tl.arange(0, D), tl.sum(g * normed, 0))


def window_keys_backward(
    values: Tensor, norm: Tensor, cosine: Tensor, sine: Tensor, grad: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of `values` [T, D] and `norm` [D] from that of the keys; rounding passes it as it is."""
    count, width = values.shape
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    assert values.stride(1) == 1
    block = 8
    programs = triton.cdiv(count, block)
    grad_values = torch.empty((count, width), dtype=values.dtype, device=values.device)
    grad_norm = torch.empty((programs, width), dtype=torch.float32, device=values.device)
    _window_backward[(programs,)](
        values, norm, cosine, sine, grad, grad_values, grad_norm, count, values.stride(0), grad.stride(0),
        eps, D=width, R=2 * cosine.shape[1], BLOCK=block, num_warps=8,
    )  # fmt: skip
    return grad_values, grad_norm.sum(0).to(norm.dtype)


@triton.jit
def _index(
    x, cosine, sine, out, heads, D: tl.constexpr, R: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    c = tl.arange(0, D)[None, :]
    at = (t * heads + h) * D + c
    keep = h < heads
    value = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    turned = keep & (c >= D - R)
    partner = tl.load(x + (t * heads + h) * D + (c ^ 1), mask=turned, other=0.0).to(tl.float32)
    value = _turned(value, partner, cosine, sine, t * (R // 2), c, c >= D - R, D, R).to(tl.float32)
    if ROUND:
        grouped = tl.reshape(value, (BLOCK, D // 32, 32))
        _, scale = ue8m0_code(tl.max(tl.abs(grouped), 2), 7.052966104933725e-38, 6.0)
        scale = tl.broadcast_to(scale[:, :, None], (BLOCK, D // 32, 32))
        code = e2m1_code(tl.math.div_rn(grouped, scale))
        size = (code & 7).to(tl.float32)
        size = tl.where(size < 5.0, size * 0.5, size - 2.0)
        size = tl.where(size == 5.0, 6.0, size)
        value = tl.reshape(tl.where(code > 7, -size, size) * scale, (BLOCK, D))
    tl.store(out + at, round_bf16(value).to(out.dtype.element_ty), mask=keep)


def index_heads(x: Tensor, cosine: Tensor, sine: Tensor, *, rounded: bool) -> Tensor:
    """See `model.ops.rotary.index_heads`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    heads = x.shape[1]
    block = min(8, triton.next_power_of_2(heads))
    _index[(len(x), triton.cdiv(heads, block))](
        x, cosine, sine, out, heads, D=x.shape[2], R=2 * cosine.shape[1], ROUND=rounded, BLOCK=block,
        num_warps=2, **UNFUSED,
    )  # fmt: skip
    return out
