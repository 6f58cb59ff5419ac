"""Backward of the fused log-probability: by chunks of the vocabulary, two matrix products each."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.linear_logprob.triton import COLUMNS, forward, logit_gradients

# Elements of one chunk of logit gradients (bf16): 335 MB.
_CHUNK_ELEMENTS = 8192 * 20480


class LinearLogprob(torch.autograd.Function):
    """See `model.ops.linear_logprob.linear_logprob`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Keep the inputs and two numbers a row."""
        hidden, weight = hidden.contiguous(), weight.contiguous()
        logprob, entropy, lse = forward(hidden, weight, labels, temperature=temperature)
        ctx.save_for_backward(hidden, weight, labels, lse, entropy)
        ctx.temperature = temperature
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and weight."""
        hidden, weight, labels, lse, entropy = ctx.saved_tensors
        chunk = max(COLUMNS, min(_CHUNK_ELEMENTS // len(hidden), len(weight)) // COLUMNS * COLUMNS)
        buffer = torch.empty((len(hidden), chunk), dtype=hidden.dtype, device=hidden.device)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight)
        for start in range(0, len(weight), chunk):
            columns = slice(start, min(start + chunk, len(weight)))
            grad = logit_gradients(
                hidden,
                weight,
                labels,
                lse,
                entropy,
                grad_logprob.contiguous(),
                grad_entropy.contiguous(),
                temperature=ctx.temperature,
                columns=columns,
                out=buffer,
            )
            torch.mm(grad.T, hidden, out=grad_weight[columns])
            grad_hidden += grad @ weight[columns]
        return grad_hidden.to(hidden.dtype), grad_weight, None, None
