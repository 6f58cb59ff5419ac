"""E2M1, the 4-bit float: magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6, round to nearest, ties to the even mantissa.

A code is `sign << 3 | index of the magnitude`. Packed, the even column is the low nibble of its byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX = 6.0
_MAGIC = 0.5 * 1.5 * 2.0**23
"""Adding and subtracting this rounds a float32 below 2 to a multiple of 0.5, ties to even."""
_EXPONENT_BITS = 0x7F800000


def round_to_grid(x: Tensor) -> Tensor:
    """The E2M1 value nearest to each float32 of `x`, clipped to +-6; the sign of zero is kept."""
    x = x.clamp(-MAX, MAX)
    binade = x.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)
    magic = binade.clamp_min_(1.0).mul_(_MAGIC)
    return (x + magic).sub_(magic).copysign_(x)


def encode(values: Tensor) -> Tensor:
    """Codes, uint8 0..15, of values that already lie on the grid."""
    magnitude = values.abs()
    index = torch.where(
        magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4)
    )
    return index.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """Values, float32, of uint8 codes."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    return torch.cat([magnitudes, -magnitudes])[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte: [..., n] to [..., n / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """One code a byte: [..., n / 2] to [..., n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
