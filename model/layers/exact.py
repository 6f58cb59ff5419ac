"""Exact mode: a token's results do not depend, in any bit, on what is computed beside it.

The order in which a matrix product sums depends on the number of its rows, and an elementwise function rounds
differently in the last few elements of a tensor than in the others. Exact mode therefore gives every
operation the same shape for a token whatever the batch: rows come in blocks of `BLOCK_ROWS` (the last one
filled up), a product is one product of fixed shape a block, and attention is one product of fixed shape a
token. A result then depends neither on the number of rows, nor on a row's place, nor on padding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_ROWS = 32
"""Rows of a block. A multiple of every vector length, so that no element is left to a scalar tail."""

_mode = threading.local()


def is_exact() -> bool:
    """Whether this thread computes in exact mode."""
    return getattr(_mode, "exact", False)


@contextmanager
def exact_mode(on: bool) -> Iterator[None]:
    """Compute in exact mode, or not, in this thread until the block ends."""
    before = is_exact()
    _mode.exact = on
    try:
        yield
    finally:
        _mode.exact = before


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def in_present_mode(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function that runs in the mode of now, whenever and in whichever thread it is called."""
    on = is_exact()

    @wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with exact_mode(on):
            return function(*args, **kwargs)

    return run


class _HasExact(Protocol):
    exact: bool


_Owner = TypeVar("_Owner", bound=_HasExact)


def in_own_mode(
    method: Callable[Concatenate[_Owner, _Arguments], _Result],
) -> Callable[Concatenate[_Owner, _Arguments], _Result]:
    """A method that runs in exact mode when its object's `exact` says so."""

    @wraps(method)
    def run(self: _Owner, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with exact_mode(self.exact):
            return method(self, *args, **kwargs)

    return run


def fill(x: Tensor) -> Tensor:
    """In exact mode `x` [T, ...] with its last row repeated up to whole blocks; otherwise `x`."""
    missing = -x.shape[0] % BLOCK_ROWS
    if not missing or not x.shape[0] or not is_exact():
        return x
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])


def _blocks(x: Tensor, weight: Tensor) -> Tensor:
    """[T, K] times [N, K] as one product of fixed shape a block, [T, N]."""
    rows = x.shape[0]
    filled = F.pad(x, (0, 0, 0, -rows % BLOCK_ROWS)) if rows % BLOCK_ROWS else x
    blocks = filled.view(-1, BLOCK_ROWS, x.shape[1])
    return torch.bmm(blocks, weight.t().expand(blocks.shape[0], -1, -1)).flatten(0, 1)[:rows]


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _blocks(x, weight)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        return grad_x, grads[0].t() @ x if ctx.needs_input_grad[1] else None


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """[..., K] times [N, K] of the same dtype to [..., N], in blocks of rows when in exact mode."""
    if not is_exact():
        return F.linear(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    product: Tensor = _BlockLinear.apply(flat, weight)  # pyright: ignore[reportAssignmentType]
    return product.view(*x.shape[:-1], weight.shape[0])
