"""Joins forward and backward of hyper-connections for autograd: sites, and their coefficients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.hyper_boundary import gradients, triton


class Update(torch.autograd.Function):
    """Finish a site: updated streams, the next site's input, the streams' sums of squares."""

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, branch: Tensor, coefficient: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.ops.hyper_boundary.hyper_update`."""
        updated, normed, squares = triton.update(streams, branch, coefficient, norm, eps)
        ctx.save_for_backward(streams, branch, coefficient, norm, updated)
        ctx.eps = eps
        ctx.mark_non_differentiable(squares)
        return updated, normed, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of streams, branch, coefficients and norm."""
        streams, branch, coefficient, norm, updated = ctx.saved_tensors
        arguments = (streams, updated, branch, coefficient, norm, ctx.eps, grads[0], grads[1])
        return *gradients.site_backward(*arguments), None


class Input(torch.autograd.Function):
    """Input of a site whose streams were changed on the way to it."""

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, coefficient: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `model.ops.hyper_boundary.hyper_input`."""
        normed, squares = gradients.site_input(streams, coefficient, norm, eps)
        ctx.save_for_backward(streams, coefficient, norm)
        ctx.eps = eps
        ctx.mark_non_differentiable(squares)
        return normed, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of streams, coefficients (the input mix alone) and norm."""
        streams, coefficient, norm = ctx.saved_tensors
        nothing = torch.zeros_like(streams)
        grad, _, grad_coefficient, grad_norm = gradients.site_backward(
            None, streams, None, coefficient, norm, ctx.eps, nothing, grads[0]
        )
        return grad, grad_coefficient, grad_norm, None


class Coefficients(torch.autograd.Function):
    """Coefficients of a site from its streams."""

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, squares: Tensor, projection: Tensor, base: Tensor, scale: Tensor
    ) -> Tensor:
        """See `model.ops.hyper_boundary.hyper_coefficients`."""
        split = triton.split_projection(projection)
        ctx.save_for_backward(streams, squares, split, base, scale)
        return triton.coefficients(streams, squares, split, base, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of streams, projection, base and scale."""
        streams, squares, split, base, scale = ctx.saved_tensors
        flat = streams.flatten(1)
        width = flat.shape[1]
        inverse = torch.rsqrt(squares / width + 1e-20)[:, None]
        both = torch.mm(flat, split, out_dtype=torch.float32)
        logits = (both[:, :24] + both[:, 32:56]) * inverse
        grad = gradients.logit_gradients(logits, base, scale, grads[0].contiguous())
        factor = scale.repeat_interleave(torch.tensor([4, 4, 16], device=scale.device), output_size=24)
        products = (grad * logits).split([4, 4, 16], 1)
        grad_scale = torch.stack([part.sum() for part in products])
        inner = (grad * factor * logits).sum(1, keepdim=True)
        raw = (grad * factor * inverse).to(flat.dtype)
        grad_flat = torch.mm(raw, split[:, :24].t())
        shrink = (-inner * inverse.square() / width).to(flat.dtype)
        grad_streams = grad_flat.addcmul_(flat, shrink).view_as(streams)
        grad_projection = torch.mm(raw.t(), flat, out_dtype=torch.float32)
        return grad_streams, None, grad_projection, grad.sum(0), grad_scale
