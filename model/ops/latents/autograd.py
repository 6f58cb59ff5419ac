"""Gradient of the norm of query latents."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.latents import triton


class LatentNorm(torch.autograd.Function):
    """See `model.ops.latents.latent_norm`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Normalised latents [T, N]."""
        out, factors = triton.latent_norm(values, norm, eps)
        ctx.save_for_backward(values, norm, factors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the latents and of the norm's weight, by the kernel of PyTorch's own norm."""
        values, norm, factors = ctx.saved_tensors
        gradients = torch.ops.aten._fused_rms_norm_backward(
            grads[0].contiguous(), values, [values.shape[1]], factors, norm, [True, True]
        )
        return *gradients, None
