"""Rotary position embedding, and sliding-window keys from projection to rounded key in one pass.

Only the last channels of a head turn: in place that moves an eighth of what a copy of the heads would.
"""

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.records import pack, unpack
from model.ops.rotary import reference
from model.quant.blocks import straight_through

__all__ = ["index_heads", "rotary", "window_keys"]


def rotary(
    x: Tensor, cosine: Tensor, sine: Tensor, *, inverse: bool = False, in_place: bool = False
) -> Tensor:
    """`x` with the last R channels of each head turned in adjacent pairs.

    Args:
        x: [T, H, D] or [T, D] bf16.
        cosine: [T, R / 2] fp32.
        sine: the same.
        inverse: turn back.
        in_place: `x` may be overwritten (a result of its own that nobody else reads).
    """
    if len(cosine) != len(x) or cosine.shape != sine.shape:
        raise ValueError(f"{len(x)} rows need as many angles, got {cosine.shape} and {sine.shape}")
    if use_kernel("rotary", x):
        from model.ops.rotary import triton
        from model.ops.rotary.autograd import Rotary

        sign = -1.0 if inverse else 1.0
        if torch.is_grad_enabled() and x.requires_grad:
            return Rotary.apply(x, cosine, sine, sign, in_place and x.is_contiguous())  # pyright: ignore
        own = x if in_place and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return triton.rotary_(own, cosine, sine, sign)
    return reference.rotary(x, cosine, -sine if inverse else sine)


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
    """RMSNorm, rotation and FP8 rounding of sliding-window keys; their records go into the cache.

    Args:
        values: [T, D] bf16, projected.
        norm: [D] weight.
        cosine: [T, R / 2] fp32.
        sine: the same.
        eps: of the norm.
        rounded: give keys as the records decode to them, with the gradient of the identity.
        ring: [rows, bytes] uint8 window records to write into; for passes without gradient.
        target: [T] int row of each token's record, negative for tokens that leave none.
        out: [T, D] to write the keys into; for passes without gradient.

    Returns:
        Keys [T, D], differentiable in `values` and `norm`.
    """
    if (ring is None) != (target is None):
        raise ValueError("records need both the ring to write into and each token's row in it")
    if use_kernel("window_keys", values):
        from model.ops.rotary import triton
        from model.ops.rotary.autograd import WindowKeys

        if torch.is_grad_enabled() and values.requires_grad:
            return WindowKeys.apply(values, norm, cosine, sine, eps, rounded)  # pyright: ignore
        return triton.window_keys(
            values, norm, cosine, sine, eps=eps, rounded=rounded, ring=ring, target=target, out=out
        )
    keys, records = reference.window_keys(values, norm, cosine, sine, eps=eps, rounded=rounded)
    if ring is not None and target is not None:
        kept = (target >= 0).nonzero()[:, 0]
        ring.index_copy_(0, target[kept].long(), records[kept])
    return keys if out is None else out.copy_(keys)


def index_heads(x: Tensor, cosine: Tensor, sine: Tensor, *, rounded: bool) -> Tensor:
    """Index queries or keys [T, H, D] bf16, rotated and with `rounded` as their FP4 records decode.

    A choice has no gradient, but the loss that trains scores has one: that of the rotation, as if nothing
    were rounded.
    """
    if use_kernel("index_heads", x):
        from model.ops.rotary import triton
        from model.ops.rotary.autograd import IndexHeads

        if torch.is_grad_enabled() and x.requires_grad:
            return IndexHeads.apply(x, cosine, sine, rounded)  # pyright: ignore[reportReturnType]
        return triton.index_heads(x, cosine, sine, rounded=rounded)
    turned = reference.rotary(x, cosine, sine)
    return straight_through(turned, _index_rounded) if rounded else turned


def _index_rounded(turned: Tensor) -> Tensor:
    return unpack("index", pack("index", turned)).to(turned.dtype)
