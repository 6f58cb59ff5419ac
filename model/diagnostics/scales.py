"""Counts block scales at the ends of their range and values beyond the grid, by layer.

A scale at its upper end means that a block saturates, one at its lower end that a block is all but zero. A
value is clipped when it lies beyond the largest code times its scale. With E4M3 scales that is normal for the
largest value of a block up to 1/16 (the scale itself is rounded); a block counts as saturated only where its
scale could not grow further. Power-of-two scales are rounded up and never clip below their upper end.

Counting costs a few comparisons beside the rounding itself and one transfer from the device when the counts
are read. Padding of rows is counted too, as it is rounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from model.config import AttentionMode
from model.layers.attention import Attention, Globals
from model.policy import Policy
from model.quant import e2m1, e4m3
from model.quant.blocks import Rounded, index_scale, main_scale, probing, window_scale


@dataclass(frozen=True, slots=True)
class ScaleRange:
    """The smallest and largest scale that a format can store, and the largest magnitude of its codes."""

    floor: float
    ceiling: float
    largest: float


_COUNTED = ("floor", "ceiling", "clipped", "nonfinite")


def _floor(scale_of: Callable[[Tensor], Tensor]) -> float:
    return float(scale_of(torch.zeros(1, 32)))


_POWER_CEILING = 2.0**127
RANGES = {
    Rounded.MAIN: ScaleRange(_floor(main_scale), e4m3.MAX, e2m1.MAX),
    Rounded.WINDOW: ScaleRange(_floor(window_scale), _POWER_CEILING, e4m3.MAX),
    Rounded.ACTIVATION: ScaleRange(_floor(window_scale), _POWER_CEILING, e4m3.MAX),
    Rounded.INDEX: ScaleRange(_floor(index_scale), _POWER_CEILING, e2m1.MAX),
}
"""Floors: 2^-9 (main keys), 2^-22 (a block below 1e-4 counts as 1e-4), 2^-126. Ceilings: 448, 2^127."""


@dataclass(frozen=True, slots=True)
class ScaleCount:
    """What one layer rounded of one kind."""

    layer: str
    """Number of the layer, or `mtp.<number>` of a drafter's block."""
    kind: Rounded
    blocks: int
    values: int
    floor: int
    """Blocks whose scale is the smallest."""
    ceiling: int
    """Blocks whose scale is the largest."""
    clipped: int
    """Values beyond the largest code."""
    nonfinite: int
    """Blocks that hold an infinity or no number, and have no meaningful scale."""

    def shares(self) -> dict[str, float]:
        """Shares of blocks at the floor, at the ceiling and not finite, and of values clipped."""
        blocks, values = max(self.blocks, 1), max(self.values, 1)
        return {
            "floor": self.floor / blocks,
            "ceiling": self.ceiling / blocks,
            "clipped": self.clipped / values,
            "nonfinite": self.nonfinite / blocks,
        }


class ScaleCounter:
    """Adds up what is rounded while it is the probe; `layer` says where. Counts may be read in any thread."""

    def __init__(self) -> None:
        self.layer = ""
        """Where the pass is now."""
        self._counts: dict[tuple[str, Rounded], Tensor] = {}
        self._sizes: dict[tuple[str, Rounded], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def leaves_out(self, kind: Rounded) -> bool:
        """Everything is rounded."""
        return False

    def see(self, kind: Rounded, blocks: Tensor, scale: Tensor) -> None:
        """Counts blocks [..., n] with scales [..., 1]."""
        with torch.no_grad():
            limits, magnitude = RANGES[kind], blocks.detach().abs()
            finite = magnitude.amax(-1, keepdim=True).isfinite()
            counts = torch.stack(
                [
                    (finite & (scale <= limits.floor)).sum(),
                    (finite & (scale >= limits.ceiling)).sum(),
                    (finite & (magnitude > limits.largest * scale)).sum(),
                    (~finite).sum(),
                ]
            )
        key = (self.layer, kind)
        with self._lock:
            self._counts[key] = self._counts[key] + counts if key in self._counts else counts
            done = self._sizes.get(key, (0, 0))
            self._sizes[key] = (done[0] + scale.numel(), done[1] + blocks.numel())

    def clear(self) -> None:
        """Starts again from nothing."""
        with self._lock:
            self._counts, self._sizes = {}, {}

    def counts(self) -> tuple[ScaleCount, ...]:
        """The counts so far, in the order in which layers and kinds were first seen."""
        with self._lock:
            found, sizes = dict(self._counts), dict(self._sizes)
        if not found:
            return ()
        rows = torch.stack(list(found.values())).tolist()
        return tuple(
            ScaleCount(
                *key, blocks=sizes[key][0], values=sizes[key][1], **dict(zip(_COUNTED, row, strict=True))
            )
            for key, row in zip(found, rows, strict=True)
        )

    def metrics(self, scope: str) -> dict[str, float]:
        """`quant/<scope>/<kind>.<share>` over all layers, and `quant/<scope>/layer.<n>.<kind>.<share>`."""
        found: dict[str, float] = {}
        totals: dict[Rounded, ScaleCount] = {}
        for count in self.counts():
            names = {f"layer.{count.layer}.{count.kind}.{name}": v for name, v in count.shares().items()}
            found |= {f"quant/{scope}/{name}": value for name, value in names.items()}
            totals[count.kind] = _sum(totals.get(count.kind), count)
        for kind, count in totals.items():
            found |= {f"quant/{scope}/{kind}.{name}": value for name, value in count.shares().items()}
        return found


def _sum(total: ScaleCount | None, count: ScaleCount) -> ScaleCount:
    if total is None:
        return count
    names = ("blocks", "values", *_COUNTED)
    sums = {name: getattr(total, name) + getattr(count, name) for name in names}
    return ScaleCount("all", count.kind, **sums)


class ScaleMonitor:
    """Counts what the blocks of `policy` round in every `every`-th pass, in whatever thread it runs.

    Use it as a context manager, or `close` it.
    """

    def __init__(self, policy: Policy, every: int = 1) -> None:
        self.counter = ScaleCounter()
        self._every, self._passes = every, 0
        self._handles: list[RemovableHandle] = []
        self._wrapped: list[Attention] = []
        for block in policy.blocks:
            makes_keys = block.attn.mode is AttentionMode.FULL
            first = block.layer == 0
            enter, leave = self._turnstile(str(block.layer), first and not makes_keys)
            self._attach(block, enter, leave)
            if makes_keys:
                self._wrap(block.attn, *self._turnstile(str(block.layer), first))
        for number, block in enumerate([] if policy.mtp is None else policy.mtp.blocks):
            self._attach(block, *self._turnstile(f"mtp.{number}", False))

    def _turnstile(self, name: str, first: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        """What to call before and after the part `name` of a pass; `first`: with it a pass begins."""
        entered: list[AbstractContextManager[None]] = []

        def enter(*_: object) -> None:
            self._passes += first
            if (self._passes - 1) % self._every == 0:
                self.counter.layer = name
                entered.append(probing(self.counter))
                entered[-1].__enter__()

        def leave(*_: object) -> None:
            while entered:
                entered.pop().__exit__(None, None, None)

        return enter, leave

    def _attach(self, module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _wrap(self, attention: Attention, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        """Main keys are made beside the forward pass of their block, which has no hooks there."""

        def add_keys(own: Attention, *args: Any, **kwargs: Any) -> list[Globals]:
            enter()
            try:
                return type(own).add_keys(own, *args, **kwargs)
            finally:
                leave()

        attention.add_keys = MethodType(add_keys, attention)
        self._wrapped.append(attention)

    def metrics(self, scope: str) -> dict[str, float]:
        """The shares since the last call, by name; empty when nothing was rounded."""
        found = self.counter.metrics(scope)
        self.counter.clear()
        return found

    def close(self) -> None:
        """Takes its hooks off the policy."""
        for handle in self._handles:
            handle.remove()
        for attention in self._wrapped:
            del attention.add_keys
        self._handles, self._wrapped = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
