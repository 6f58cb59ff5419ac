"""Block quantisers: how a vector becomes codes and scales, and the rounding a forward pass sees.

Three formats are in use: main keys (E2M1 with an E4M3 scale per 16), sliding-window keys and activations
(E4M3 with a power-of-two scale per 32), index queries and keys and expert weights (E2M1 with a power-of-two
scale per 32). A width below the block is one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from model.quant import e2m1, e4m3, ue8m0

MAIN_BLOCK = 16
WIDE_BLOCK = 32


class Rounded(StrEnum):
    """What is rounded."""

    MAIN = "main"
    """Main keys: E2M1, an E4M3 scale per 16."""
    WINDOW = "window"
    """Sliding-window keys: E4M3, a power-of-two scale per 32."""
    INDEX = "index"
    """Index queries and keys: E2M1, a power-of-two scale per 32."""
    ACTIVATION = "activation"
    """Inputs of FP8 and FP4 linear maps: as window keys."""


class Probe(Protocol):
    """Looks on while a forward pass rounds, and may leave out some of it."""

    def leaves_out(self, kind: Rounded) -> bool:
        """Whether `kind` passes unrounded."""
        ...

    def see(self, kind: Rounded, blocks: Tensor, scale: Tensor) -> None:
        """Gets float32 blocks [..., n] before rounding and their scales [..., 1]."""
        ...


_probe: ContextVar[Probe | None] = ContextVar("probe", default=None)


@contextmanager
def probing(probe: Probe) -> Iterator[None]:
    """Shows all rounding of this thread to `probe`."""
    token = _probe.set(probe)
    try:
        yield
    finally:
        _probe.reset(token)


def _blocks(x: Tensor, block: int) -> Tensor:
    return x.float().unflatten(-1, (-1, min(block, x.shape[-1])))


def _absolute_maximum(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(dim=-1, keepdim=True)


def main_scale(blocks: Tensor) -> Tensor:
    """E4M3 scales [..., 1] of blocks [..., 16]: largest magnitude / 6, at least 2^-9, at most 448."""
    return e4m3.round_to_grid(_absolute_maximum(blocks).clamp_min_(e2m1.MAX * 2.0**-9) / e2m1.MAX)


def window_scale(blocks: Tensor) -> Tensor:
    """Power-of-two scales [..., 1] that bring blocks [..., 32] into E4M3's range."""
    return ue8m0.round_up(_absolute_maximum(blocks).clamp_min_(1e-4) * (1.0 / e4m3.MAX))


def index_scale(blocks: Tensor) -> Tensor:
    """Power-of-two scales [..., 1] that bring blocks [..., 32] into E2M1's range."""
    return ue8m0.round_up(_absolute_maximum(blocks).clamp_min_(e2m1.MAX * 2.0**-126) * (1.0 / e2m1.MAX))


def _round(
    x: Tensor,
    kind: Rounded,
    block: int,
    scale_of: Callable[[Tensor], Tensor],
    grid: Callable[[Tensor], Tensor],
) -> Tensor:
    probe = _probe.get()
    if probe is not None and probe.leaves_out(kind):
        return x
    blocks = _blocks(x, block)
    scale = scale_of(blocks)
    if probe is not None:
        probe.see(kind, blocks, scale)
    return grid(blocks / scale).mul_(scale).flatten(-2).to(x.dtype)


def round_main(x: Tensor) -> Tensor:
    """`x` as main keys are stored: E2M1, E4M3 scale per 16."""
    return _round(x, Rounded.MAIN, MAIN_BLOCK, main_scale, e2m1.round_to_grid)


def round_window(x: Tensor) -> Tensor:
    """`x` as sliding-window keys are stored: E4M3, power-of-two scale per 32."""
    return _round(x, Rounded.WINDOW, WIDE_BLOCK, window_scale, e4m3.round_to_grid)


def round_activation(x: Tensor) -> Tensor:
    """`x` as the input of an FP8 or FP4 linear map: the format of window keys."""
    return _round(x, Rounded.ACTIVATION, WIDE_BLOCK, window_scale, e4m3.round_to_grid)


def round_index(x: Tensor) -> Tensor:
    """`x` as index queries and keys are stored: E2M1, power-of-two scale per 32."""
    return _round(x, Rounded.INDEX, WIDE_BLOCK, index_scale, e2m1.round_to_grid)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """`rounding(x)` with the gradient of the identity."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _StraightThrough.apply(x, rounding)  # pyright: ignore[reportReturnType]
    return rounding(x)
