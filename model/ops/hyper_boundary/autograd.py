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
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares)
        return updated, normed, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of streams, branch, coefficients and norm."""
        streams, branch, coefficient, norm, updated = ctx.saved_tensors
        grad_updated = torch.zeros_like(updated) if grads[0] is None else grads[0]
        grad_normed = torch.zeros_like(branch) if grads[1] is None else grads[1]
        arguments = (streams, updated, branch, coefficient, norm, ctx.eps, grad_updated, grad_normed)
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
        grad, _, grad_coefficient, grad_norm = gradients.site_backward(
            None, streams, None, coefficient, norm, ctx.eps, None, grads[0]
        )
        return grad, grad_coefficient, grad_norm, None


class Coefficients(torch.autograd.Function):
    """Coefficients of a site from its streams, and the streams, whose gradients are added on the way back."""

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, squares: Tensor, projection: Tensor, base: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `model.ops.hyper_boundary.hyper_coefficients`."""
        split = triton.split_projection(projection)
        ctx.save_for_backward(streams, squares, split, base, scale)
        ctx.set_materialize_grads(False)
        return triton.coefficients(streams, squares, split, base, scale), streams.view_as(streams)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_streams: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of streams, projection, base and scale."""
        if grad is None:
            return grad_streams, None, None, None, None
        streams, squares, split, base, scale = ctx.saved_tensors
        flat = streams.flatten(1)
        products = torch.mm(flat, split, out_dtype=torch.float32)
        raw, shrink, grad_base, grad_scale = gradients.logit_gradients(
            products, squares, base, scale, grad.contiguous(), flat.shape[1]
        )
        grad_projection = torch.mm(raw[:, :24].t(), flat, out_dtype=torch.float32)
        grad_streams = gradients.stream_gradients(streams, raw, shrink, split, grad_streams)
        return grad_streams, None, grad_projection, grad_base, grad_scale
