"""Rotary position embedding on the last channels of a vector, adjacent channels forming a pair.

Angles are products in float32 of position and frequency, as in the published computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import PolicyConfig, RopeScaling


def inverse_frequencies(width: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """theta^(-2k / width) for k < width / 2, float32, stretched by YaRN where `scaling` is given."""
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    if scaling is None:
        return frequencies

    def dimension(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def layer_frequencies(config: PolicyConfig, ratio: int) -> Tensor:
    """Frequencies of a layer with compression `ratio`: window-only layers have their own base and no YaRN."""
    if ratio == 0:
        return inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, None)
    return inverse_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Unit complex numbers [..., r / 2] for a set of positions, and their conjugates for turning back."""

    forward: Tensor
    backward: Tensor

    @staticmethod
    def at(positions: Tensor, frequencies: Tensor) -> Rotation:
        """The rotation of each of `positions` [...]."""
        cosine, sine = cosine_and_sine(positions, frequencies)
        return Rotation(torch.complex(cosine, sine), torch.complex(cosine, -sine))

    def per_head(self) -> Rotation:
        """The same rotation for each head: [..., 1, r / 2]."""
        return Rotation(self.forward.unsqueeze(-2), self.backward.unsqueeze(-2))

    def inverse(self) -> Rotation:
        """The opposite rotation."""
        return Rotation(self.backward, self.forward)


def cosine_and_sine(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """[..., r / 2] fp32 each, of the angles at `positions` [...]."""
    angle = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angle.cos(), angle.sin()


def _rotated(x: Tensor, turn: Tensor) -> Tensor:
    width = 2 * turn.shape[-1]
    result = x.clone(memory_format=torch.contiguous_format)
    if x.dtype is not torch.bfloat16:
        torch.view_as_complex(result[..., -width:].unflatten(-1, (-1, 2))).mul_(turn)
        return result
    wide = x[..., -width:].float().unflatten(-1, (-1, 2))
    result[..., -width:] = torch.view_as_real(torch.view_as_complex(wide) * turn).flatten(-2).to(x.dtype)
    return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, turn: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _rotated(x, turn)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(grads[0], ctx.saved_tensors[0]), None, None


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """`x` [..., c] with its last r channels turned; `rotation` broadcasts over the leading dimensions."""
    if not torch.is_grad_enabled():
        return _rotated(x, rotation.forward)
    return _Rotate.apply(x, rotation.forward, rotation.backward)  # pyright: ignore[reportReturnType]
