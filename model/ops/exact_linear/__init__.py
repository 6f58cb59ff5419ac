"""Linear maps for exact mode on a GPU: libraries pick a kernel by the number of rows, this does not."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.dispatch import use_kernel

__all__ = ["exact_linear", "exact_pair"]


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        from model.ops.exact_linear import triton

        ctx.save_for_backward(x, weight)
        # [T, G, N] in memory, so that the groups of a token lie side by side.
        out = torch.empty((x.shape[1], x.shape[0], weight.shape[1]), dtype=dtype, device=x.device)
        return triton.product(x, weight, out.transpose(0, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return torch.bmm(grad, weight), torch.bmm(grad.transpose(1, 2), x), None


def exact_linear(x: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """`x` [..., K] times `weight` [N, K], or by groups [G, T, K] times [G, N, K]: [..., N], sums in fp32.

    A row's bits depend on nothing but itself and the weight. `dtype` of the result: that of `x` when None.
    """
    dtype = dtype or x.dtype
    if use_kernel("exact_linear", x):
        if weight.dim() == 3:
            return _ExactLinear.apply(x, weight.contiguous(), dtype)  # pyright: ignore[reportReturnType]
        flat = x.reshape(1, -1, x.shape[-1])
        product: Tensor = _ExactLinear.apply(flat, weight[None], dtype)  # pyright: ignore[reportAssignmentType]
        return product.view(*x.shape[:-1], len(weight))
    # So wide that the order of a sum, which depends on the number of rows, does not show.
    return (x.double() @ weight.double().transpose(-1, -2)).to(dtype)


def exact_pair(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`exact_linear` of `x` [T, K] with two matrices, side by side: [T, N + M]. Without gradient."""
    if use_kernel("exact_pair", x):
        from model.ops.exact_linear import triton

        if triton.pairs(first, second):
            out = x.new_empty((1, len(x), len(first) + len(second)))
            return triton.product(x[None], first[None], out, second[None])[0]
    return torch.cat([exact_linear(x, first), exact_linear(x, second)], 1)
