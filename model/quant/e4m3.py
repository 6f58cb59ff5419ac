"""E4M3, the 8-bit float with 3 bits of mantissa (largest 448, no infinity), round to nearest even."""

from __future__ import annotations

import torch
from torch import Tensor

MAX = 448.0


def encode(x: Tensor) -> Tensor:
    """The nearest E4M3 values, clipped to +-448, as float8_e4m3fn."""
    return x.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def round_to_grid(x: Tensor) -> Tensor:
    """The nearest E4M3 values, clipped to +-448, as float32."""
    return encode(x).float()
