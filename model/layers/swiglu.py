"""The experts' activation: weight * silu(min(gate, limit)) * clip(up, -limit, limit), with its gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class _ClippedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
        clipped_gate, clipped_up = gate.clamp(max=limit), up.clamp(-limit, limit)
        active = F.silu(clipped_gate)
        product = active * clipped_up
        ctx.save_for_backward(gate, up, weights, clipped_gate, clipped_up, active, product)
        ctx.limit = limit
        return product * weights

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate, up, weights, clipped_gate, clipped_up, active, product = ctx.saved_tensors
        limit, aten = ctx.limit, torch.ops.aten
        grad_weights = (grads[0] * product).sum(-1, keepdim=True)
        grad = grads[0] * weights
        grad_gate = aten.silu_backward(grad * clipped_up, clipped_gate)
        grad_gate = aten.hardtanh_backward(grad_gate, gate, -torch.inf, limit)
        grad_up = aten.hardtanh_backward(grad.mul_(active), up, -limit, limit)
        return grad_gate, grad_up, grad_weights, None


def clipped_swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """Gate and up [..., f], weights [..., 1] to [..., f]."""
    if torch.is_grad_enabled():
        return _ClippedSwiGLU.apply(gate, up, weights, limit)  # pyright: ignore[reportReturnType]
    return F.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit)).mul_(weights)
