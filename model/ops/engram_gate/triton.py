"""One program a token: sums over all streams at once, then what is added to them or comes back.

A token's streams and keys are read twice, the second time from the cache. The gradient of the weights is a
sum over tokens by parts of fixed tokens: no atomics.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.engram_gate.reference import SMALLEST_DOT
from model.ops.tile import LOG2E, UNFUSED, round_bf16

_SMALLEST = tl.constexpr(SMALLEST_DOT)
BLOCK = 1024
TOKENS = 256
"""Tokens of one part of the weights' gradient."""


@triton.jit
def _load(x, at, keep):
    return tl.load(x + at, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _sums(
    streams, projected, q_weight, k_weight, s, token, N, D: tl.constexpr, S: tl.constexpr, B: tl.constexpr
):
    """Of each stream: 1 / rms of stream and key, and the weighted dot of the two as they are."""
    squares = tl.zeros((S,), tl.float32)
    key_squares = tl.zeros((S,), tl.float32)
    dots = tl.zeros((S,), tl.float32)
    for first in tl.range(0, D, B):
        c = first + tl.arange(0, B)
        at = s[:, None] * D + c[None, :]
        keep = (s < N)[:, None] & (c < D)[None, :]
        x = _load(streams, token * N * D + at, keep)
        k = _load(projected, token * (N + 1) * D + at, keep)
        w = _load(q_weight, at, keep) * _load(k_weight, at, keep)
        squares += tl.sum(x * x, 1)
        key_squares += tl.sum(k * k, 1)
        dots += tl.sum(x * k * w, 1)
    return squares, key_squares, dots


@triton.jit
def _gates(squares, key_squares, dots, eps, D: tl.constexpr):
    """1 / rms of streams and keys, the scaled dot, and the gate [S]."""
    r = tl.rsqrt(squares / D + eps)
    r_key = tl.rsqrt(key_squares / D + eps)
    dot = dots * r * r_key * (1.0 / tl.sqrt(D * 1.0))
    root = tl.sqrt(tl.maximum(tl.abs(dot), _SMALLEST))
    gate = 1.0 / (1.0 + tl.exp2(tl.where(dot < 0, root, -root) * LOG2E))
    return r, r_key, dot, root, gate


@triton.jit
def _forward(
    streams,
    projected,
    q_weight,
    k_weight,
    text,
    out,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    B: tl.constexpr,
    HAS_TEXT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    squares, key_squares, dots = _sums(streams, projected, q_weight, k_weight, s, token, N, D, S, B)
    _, _, _, _, gate = _gates(squares, key_squares, dots, eps, D)
    if HAS_TEXT:
        gate *= tl.load(text + token).to(tl.float32)
    for first in tl.range(0, D, B):
        c = first + tl.arange(0, B)
        at = token * N * D + s[:, None] * D + c[None, :]
        keep = (s < N)[:, None] & (c < D)[None, :]
        value = _load(projected, token * (N + 1) * D + N * D + c, c < D)
        result = tl.fma(gate[:, None], value[None, :], _load(streams, at, keep))
        tl.store(out + at, round_bf16(result).to(out.dtype.element_ty), mask=keep)


@triton.jit
def _backward(
    streams,
    projected,
    q_weight,
    k_weight,
    text,
    grad,
    grad_streams,
    grad_projected,
    slopes,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    B: tl.constexpr,
    HAS_TEXT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    squares, key_squares, dots = _sums(streams, projected, q_weight, k_weight, s, token, N, D, S, B)
    r, r_key, dot, root, gate = _gates(squares, key_squares, dots, eps, D)
    felt = tl.zeros((S,), tl.float32)
    for first in tl.range(0, D, B):
        c = first + tl.arange(0, B)
        keep = (s < N)[:, None] & (c < D)[None, :]
        g = _load(grad, token * N * D + s[:, None] * D + c[None, :], keep)
        value = _load(projected, token * (N + 1) * D + N * D + c, c < D)
        felt += tl.sum(g * value[None, :], 1)
    slope = felt * gate * (1.0 - gate) * tl.where(tl.abs(dot) >= _SMALLEST, 0.5 / root, 0.0)
    if HAS_TEXT:
        takes = tl.load(text + token).to(tl.float32)
        slope *= takes
        gate *= takes
    through = slope * r * r_key * (1.0 / tl.sqrt(D * 1.0))
    tl.store(slopes + token * N + s, through, mask=s < N)
    shrink = slope * dot * r * r * (1.0 / D)
    shrink_key = slope * dot * r_key * r_key * (1.0 / D)
    for first in tl.range(0, D, B):
        c = first + tl.arange(0, B)
        at = s[:, None] * D + c[None, :]
        keep = (s < N)[:, None] & (c < D)[None, :]
        x = _load(streams, token * N * D + at, keep)
        k = _load(projected, token * (N + 1) * D + at, keep)
        w = _load(q_weight, at, keep) * _load(k_weight, at, keep)
        g = _load(grad, token * N * D + at, keep)
        dx = g + through[:, None] * k * w - shrink[:, None] * x
        dk = through[:, None] * x * w - shrink_key[:, None] * k
        dv = tl.sum(g * gate[:, None], 0)
        kind = grad_streams.dtype.element_ty
        tl.store(grad_streams + token * N * D + at, round_bf16(dx).to(kind), mask=keep)
        tl.store(grad_projected + token * (N + 1) * D + at, round_bf16(dk).to(kind), mask=keep)
        tl.store(grad_projected + token * (N + 1) * D + N * D + c, round_bf16(dv).to(kind), mask=c < D)


@triton.jit
def _weights(
    streams,
    projected,
    slopes,
    partial,
    count,
    N: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
):
    """Sum of slope * x * k over one part of the tokens, for one stream and some channels."""
    part = tl.program_id(0)
    s = tl.program_id(1)
    c = tl.program_id(2) * B + tl.arange(0, B)
    acc = tl.zeros((ROWS, B), tl.float32)
    for first in tl.range(0, TOKENS, ROWS):
        t = part * TOKENS + first + tl.arange(0, ROWS)
        keep = (t < count)[:, None] & (c < D)[None, :]
        row = t.to(tl.int64)[:, None]
        x = _load(streams, row * N * D + s * D + c[None, :], keep)
        k = _load(projected, row * (N + 1) * D + s * D + c[None, :], keep)
        slope = tl.load(slopes + t * N + s, mask=t < count, other=0.0)
        acc += slope[:, None] * x * k
    tl.store(partial + (part * N + s) * D + c, tl.sum(acc, 0), mask=c < D)


def _shape(streams: Tensor, text: Tensor | None) -> dict[str, int | bool]:
    n, width = streams.shape[1:]
    block = min(BLOCK, triton.next_power_of_2(width))
    padded = triton.next_power_of_2(n)
    return {"N": n, "D": width, "S": padded, "B": block, "HAS_TEXT": text is not None, "num_warps": 8}


def forward(
    streams: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, text: Tensor | None, *, eps: float
) -> Tensor:
    """Streams [T, n, d]."""
    out = torch.empty_like(streams)
    if len(streams):
        mask = streams if text is None else text
        _forward[(len(streams),)](
            streams, projected, q_weight, k_weight, mask, out, eps, **_shape(streams, text), **UNFUSED
        )
    return out


def backward(
    streams: Tensor,
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    text: Tensor | None,
    grad: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of streams, of projections, and of the weights' product [n, d] fp32."""
    count, n, width = streams.shape
    grad_streams, grad_projected = torch.empty_like(streams), torch.empty_like(projected)
    slopes = torch.empty((count, n), dtype=torch.float32, device=streams.device)
    if not count:
        return grad_streams, grad_projected, slopes.new_zeros(n, width)
    mask = streams if text is None else text
    _backward[(count,)](
        streams,
        projected,
        q_weight,
        k_weight,
        mask,
        grad,
        grad_streams,
        grad_projected,
        slopes,
        eps,
        **_shape(streams, text),
    )
    parts = triton.cdiv(count, TOKENS)
    partial = torch.empty((parts, n, width), dtype=torch.float32, device=streams.device)
    block = min(256, triton.next_power_of_2(width))
    _weights[(parts, n, triton.cdiv(width, block))](
        streams,
        projected,
        slopes,
        partial,
        count,
        N=n,
        D=width,
        TOKENS=TOKENS,
        ROWS=16,
        B=block,
        num_warps=4,
    )
    return grad_streams, grad_projected, partial.sum(0)
