"""Backward of the fused reverse KL: by chunks of the vocabulary, two matrix products each."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.linear_reverse_kl.triton import COLUMNS, forward, logit_gradients

# Elements of one chunk of logit gradients (bf16): 335 MB.
_CHUNK_ELEMENTS = 8192 * 20480


class LinearReverseKL(torch.autograd.Function):
    """See `model.ops.linear_reverse_kl.linear_reverse_kl`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, other: Tensor, head: Tensor, temperature: float
    ) -> Tensor:
        """Keep the inputs and three numbers a row."""
        tensors = [x.contiguous() for x in (hidden, weight, other, head)]
        kl, own, theirs = forward(*tensors, temperature=temperature)
        ctx.save_for_backward(*tensors, kl, own, theirs)
        ctx.temperature = temperature
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and weight."""
        hidden, weight, other, head, kl, own, theirs = ctx.saved_tensors
        rows = max(1, len(hidden))
        chunk = max(COLUMNS, min(_CHUNK_ELEMENTS // rows, len(weight)) // COLUMNS * COLUMNS)
        buffer = torch.empty((len(hidden), chunk), dtype=hidden.dtype, device=hidden.device)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight)
        for start in range(0, len(weight), chunk):
            columns = slice(start, min(start + chunk, len(weight)))
            part = logit_gradients(
                hidden,
                weight,
                other,
                head,
                (kl, own, theirs, grad.contiguous()),
                temperature=ctx.temperature,
                columns=columns,
                out=buffer,
            )
            torch.mm(part.T, hidden, out=grad_weight[columns])
            grad_hidden += part @ weight[columns]
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None
