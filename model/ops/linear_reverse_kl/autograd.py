"""Backward of the fused reverse KL: by chunks of the vocabulary, two matrix products each."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.linear_reverse_kl.triton import COLUMNS, forward, logit_gradients
from model.ops.logit_tiles import input_gradients


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
        rows = kl, own, theirs, grad.contiguous()

        def gradients(words: slice, out: Tensor) -> Tensor:
            return logit_gradients(
                hidden, weight, other, head, rows, temperature=ctx.temperature, columns=words, out=out
            )

        return *input_gradients(hidden, weight, COLUMNS, gradients), None, None, None
