"""Joins the gate's kernels for autograd."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.engram_gate.triton import backward, forward


class EngramGate(torch.autograd.Function):
    """See `model.ops.engram_gate.engram_gate`."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        projected: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        text: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Keep the arguments: gates are computed again."""
        streams, projected = streams.contiguous(), projected.contiguous()
        saved = streams, projected, q_weight.contiguous(), k_weight.contiguous()
        ctx.save_for_backward(*saved, text)
        ctx.eps = eps
        return forward(*saved, text, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of streams, projections and both weights."""
        streams, projected, q_weight, k_weight, text = ctx.saved_tensors
        grad_streams, grad_projected, product = backward(
            streams, projected, q_weight, k_weight, text, grad.contiguous(), eps=ctx.eps
        )
        grad_q, grad_k = product * k_weight.float(), product * q_weight.float()
        return grad_streams, grad_projected, grad_q.to(q_weight.dtype), grad_k.to(k_weight.dtype), None, None
