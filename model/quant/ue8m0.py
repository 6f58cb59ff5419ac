"""UE8M0, the scale that is a power of two: a byte b stands for 2^(b - 127)."""

from __future__ import annotations

import torch
from torch import Tensor

_MANTISSA = 0x7FFFFF
_EXPONENT = 0x7F800000
_HALF_OF_SMALLEST_NORMAL = 0x400000


def round_up(x: Tensor) -> Tensor:
    """The smallest powers of two not below the positive normal float32 values `x`, by exponent arithmetic."""
    return (x.view(torch.int32) + _MANTISSA).bitwise_and_(_EXPONENT).view(torch.float32)


def encode(scale: Tensor) -> Tensor:
    """Bytes of float32 powers of two."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def decode(byte: Tensor) -> Tensor:
    """Float32 powers of two of bytes (0 and 255 stand for 2^-127 and 2^128 = infinity)."""
    wide = byte.to(torch.int32)
    return torch.where(wide == 0, _HALF_OF_SMALLEST_NORMAL, wide << 23).view(torch.float32)
