"""Linear maps without bias, and the FP8 rounding of their input where the checkpoint asks for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.layers.exact import is_exact, matmul
from model.ops.dispatch import served
from model.ops.exact_linear import exact_linear
from model.quant.blocks import round_activation, straight_through


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype that its products are summed in.

    A product's order of summation depends on the batch, and a bfloat16 result, or an FP4 code made from it,
    flips on the last bit of the sum. On a processor bfloat16 models therefore sum in float64: a token gives
    the same result alone and among others.
    """
    if x.dtype is not torch.bfloat16:
        return x
    return x.to(torch.float64 if x.device.type == "cpu" else torch.float32)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` times `weight` with all bits: float32 for bfloat16 inputs, otherwise the dtype of `x`."""
    if served(x) and weight.dtype is x.dtype:
        if is_exact():
            return exact_linear(x, weight, dtype=torch.float32)
        return _WideProduct.apply(x, weight)  # pyright: ignore[reportReturnType]
    if x.dtype is not torch.bfloat16:
        return matmul(x, weight.to(x.dtype))
    wide = widen(x)
    return matmul(wide, weight.to(wide.dtype)).float()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` times `weight`, in the dtype of `x`."""
    if served(x):
        return exact_linear(x, weight) if is_exact() else F.linear(x, weight)
    return wide_linear(x, weight).to(x.dtype)


def rounded_input(x: Tensor) -> Tensor:
    """`x` rounded to FP8 with a power-of-two scale per 32."""
    return straight_through(x, round_activation)


def quantized_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` rounded to FP8 (power-of-two scale per 32) times `weight`, summed in float32, as `x` in dtype."""
    rounded = rounded_input(x)
    if served(x):
        return linear(rounded, weight)
    return wide_linear(rounded, weight).to(x.dtype)


class _WideProduct(torch.autograd.Function):
    """A product of bfloat16 tensors with a float32 result."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1])
        if x.is_cuda:
            return torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Linear(nn.Module):
    """`weight` [outputs, inputs]; `quantized`: the checkpoint stores it in FP8 and rounds its input."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, quantized: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.quantized = quantized

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return quantized_linear(x, self.weight) if self.quantized else linear(x, self.weight)
