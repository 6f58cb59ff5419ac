"""What an attention site makes of its input's projections before it asks: query latents and window keys."""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.dispatch import use_kernel
from model.ops.rotary import window_keys

__all__ = ["latent_norm", "latents"]


def latent_norm(values: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMSNorm of query latents [T, N] bf16 with weight [N], differentiable; the same bits as `latents`."""
    if use_kernel("latent_norm", values):
        from model.ops.latents.autograd import LatentNorm

        return LatentNorm.apply(values, norm, eps)  # pyright: ignore[reportReturnType]
    return F.rms_norm(values, values.shape[-1:], norm, eps)


def latents(
    values: Tensor,
    norm: Tensor,
    window: Tensor,
    window_norm: Tensor,
    rope: tuple[Tensor, Tensor],
    *,
    eps: float,
    rounded: bool,
    ring: Tensor | None = None,
    target: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`latent_norm` and `model.ops.rotary.window_keys` at once, for passes without gradient.

    Args:
        values: [T, N] bf16, projected latents.
        norm: [N] their norm's weight.
        window: [T, D] bf16, projected window keys.
        window_norm: [D] their norm's weight.
        rope: cosine and sine [T, R / 2] fp32.
        eps: of both norms.
        rounded: as of `window_keys`, like those below.
        ring: see there.
        target: see there.
        out: see there.

    Returns:
        Latents [T, N] and window keys [T, D].
    """
    if use_kernel("latents", values) and not torch.is_grad_enabled():
        from model.ops.latents import triton

        return triton.latents(values, norm, window, window_norm, *rope, eps, rounded, ring, target, out)
    keys = window_keys(
        window, window_norm, *rope, eps=eps, rounded=rounded, ring=ring, target=target, out=out
    )
    return latent_norm(values, norm, eps), keys
