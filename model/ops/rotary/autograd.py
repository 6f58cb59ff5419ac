"""Gradients of rotations, and of window keys through their rounding."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.rotary import triton


class Rotary(torch.autograd.Function):
    """See `model.ops.rotary.rotary`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, sign: float, in_place: bool) -> Tensor:
        """Rotate by the angle, or back for `sign` -1."""
        ctx.save_for_backward(cosine, sine)
        ctx.sign = sign
        if in_place:
            ctx.mark_dirty(x)
            return triton.rotary_(x, cosine, sine, sign)
        return triton.rotary_(x.clone(memory_format=torch.contiguous_format), cosine, sine, sign)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The opposite rotation."""
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        cosine, sine = ctx.saved_tensors
        return triton.rotary_(grad, cosine, sine, -ctx.sign), None, None, None, None


class WindowKeys(torch.autograd.Function):
    """See `model.ops.rotary.window_keys`: the rounding passes gradients as they are."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, norm: Tensor, cosine: Tensor, sine: Tensor, eps: float, rounded: bool
    ) -> Tensor:
        """Keys [T, D]."""
        ctx.save_for_backward(values, norm, cosine, sine)
        ctx.eps = eps
        return triton.window_keys(values, norm, cosine, sine, eps=eps, rounded=rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the projected values and of the norm's weight."""
        values, norm, cosine, sine = ctx.saved_tensors
        found = triton.window_keys_backward(values, norm, cosine, sine, grads[0], eps=ctx.eps)
        return *found, None, None, None, None


class IndexHeads(torch.autograd.Function):
    """See `model.ops.rotary.index_heads`: the rounding passes gradients as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, rounded: bool) -> Tensor:
        """Heads [T, H, D]."""
        ctx.save_for_backward(cosine, sine)
        return triton.index_heads(x, cosine, sine, rounded=rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The opposite rotation."""
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        cosine, sine = ctx.saved_tensors
        return triton.rotary_(grad, cosine, sine, -1.0), None, None, None
