"""Joins the loss and its gradients for autograd; the forward keeps one slope a selected entry."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.index_loss.triton import backward, forward
from model.ops.sparse_attention.inverse import InverseIndex, invert


class IndexLoss(torch.autograd.Function):
    """See `model.ops.index_loss.index_loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        weights: Tensor,
        index_keys: Tensor,
        query: Tensor,
        entries: Tensor,
        lse: Tensor,
        indices: Tensor,
        scale: float,
        inverse: InverseIndex | None,
    ) -> Tensor:
        """Losses [T]."""
        heads, weights, indices = heads.contiguous(), weights.contiguous(), indices.contiguous()
        student = heads, weights, index_keys.contiguous()
        losses, slopes = forward(
            *student, query.contiguous(), entries.contiguous(), lse.contiguous(), indices, scale=scale
        )
        ctx.save_for_backward(*student, indices, slopes)
        ctx.inverse = inverse
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of heads, weights and index keys."""
        heads, weights, keys, indices, slopes = ctx.saved_tensors
        inverse = ctx.inverse if ctx.inverse is not None else invert(indices, len(keys))
        found = backward(heads, weights, keys, indices, slopes, grad.contiguous(), inverse)
        grads = (x.to(of.dtype) for x, of in zip(found, (heads, weights, keys), strict=True))
        return *grads, None, None, None, None, None, None
