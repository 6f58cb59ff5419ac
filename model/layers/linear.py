"""Linear maps without bias, and the FP8 rounding of their input where the checkpoint asks for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.quant.blocks import round_window, straight_through


def quantized_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` rounded to FP8 (power-of-two scale per 32) times `weight`, summed in float32, as `x` in dtype."""
    rounded = straight_through(x, round_window)
    return F.linear(rounded.float(), weight.float()).to(x.dtype)


class Linear(nn.Module):
    """`weight` [outputs, inputs]; `quantized`: the checkpoint stores it in FP8 and rounds its input."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, quantized: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.quantized = quantized

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return quantized_linear(x, self.weight) if self.quantized else F.linear(x, self.weight)
