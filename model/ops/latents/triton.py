"""RMSNorm of query latents, alone and beside the window keys of the same tokens in one launch."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.records import record_bytes
from model.ops.rotary.triton import window_row
from model.ops.tile import UNFUSED, round_bf16

# Of both kernels: with it the order of the sum, and so the bits, would change.
_WARPS = 4


@triton.jit
def _norm_row(t, values, norm, out, stride, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    keep = c < N
    x = tl.load(values + t * stride + c, mask=keep, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) * (1.0 / N) + eps)
    x = x * factor * tl.load(norm + c, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + t * N + c, round_bf16(x).to(out.dtype.element_ty), mask=keep)
    return factor


@triton.jit
def _norm(values, norm, out, factors, stride, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    tl.store(factors + t, _norm_row(t, values, norm, out, stride, eps, N, BLOCK))


def latent_norm(values: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised latents [T, N], and the factors [T, 1] fp32 that their backward needs."""
    count, width = values.shape
    assert values.stride(1) == 1
    out = torch.empty((count, width), dtype=values.dtype, device=values.device)
    factors = torch.empty((count, 1), dtype=torch.float32, device=values.device)
    _norm[(count,)](
        values, norm, out, factors, values.stride(0), eps, N=width, BLOCK=triton.next_power_of_2(width),
        num_warps=_WARPS, **UNFUSED,
    )  # fmt: skip
    return out, factors


@triton.jit
def _latents(
    values, norm, latent, value_stride, window, window_norm, cosine, sine, keys, ring, target, stride,
    key_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    ROUND: tl.constexpr, WRITE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _norm_row(t, values, norm, latent, value_stride, eps, N, BLOCK)
    else:
        window_row(
            t, window, window_norm, cosine, sine, keys, ring, target, stride, key_stride, eps, D, R, ROUND,
            WRITE, BYTES,
        )  # fmt: skip


def latents(
    values: Tensor,
    norm: Tensor,
    window: Tensor,
    window_norm: Tensor,
    cosine: Tensor,
    sine: Tensor,
    eps: float,
    rounded: bool,
    ring: Tensor | None,
    target: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `model.ops.latents.latents`."""
    (count, width), channels = values.shape, window.shape[1]
    latent = torch.empty((count, width), dtype=values.dtype, device=values.device)
    keys = torch.empty((count, channels), dtype=window.dtype, device=window.device) if out is None else out
    assert values.stride(1) == window.stride(1) == keys.stride(1) == 1
    assert ring is None or (ring.is_contiguous() and ring.shape[-1] == record_bytes("window", channels))
    _latents[(count, 2)](
        values, norm, latent, values.stride(0), window, window_norm, cosine, sine, keys,
        window if ring is None else ring, window if target is None else target, window.stride(0),
        keys.stride(0), eps, N=width, BLOCK=triton.next_power_of_2(width), D=channels,
        R=2 * cosine.shape[1], ROUND=rounded, WRITE=ring is not None,
        BYTES=record_bytes("window", channels), num_warps=_WARPS, **UNFUSED,
    )  # fmt: skip
    return latent, keys
