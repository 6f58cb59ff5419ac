"""Counts block scales at the ends of their range and values beyond the grid, by layer.

A scale at its upper end means that a block saturates, one at its lower end that a block is all but zero. A
value is clipped when it lies beyond the largest code times its scale. With E4M3 scales that is normal for the
largest value of a block up to 1/16 (the scale itself is rounded); a block counts as saturated only where its
scale could not grow further. Power-of-two scales are rounded up and never clip below their upper end.

Counting costs a few comparisons beside the rounding itself and one transfer from the device when the counts
are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.policy import Policy
from model.quant import e2m1, e4m3
from model.quant.blocks import Rounded, index_scale, main_scale, probing, window_scale


@dataclass(frozen=True, slots=True)
class ScaleRange:
    """The smallest and largest scale that a format can store, and the largest magnitude of its codes."""

    floor: float
    ceiling: float
    largest: float


def _floor(scale_of) -> float:  # noqa: ANN001
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
    floor: int
    """Blocks whose scale is the smallest."""
    ceiling: int
    """Blocks whose scale is the largest."""
    values: int
    clipped: int
    """Values beyond the largest code."""
    nonfinite: int
    """Blocks that hold an infinity or no number."""

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
    """Adds up what is rounded while it is the probe; `layer` says where."""

    def __init__(self) -> None:
        self.layer: str | None = None
        """Where the pass is now; what is rounded elsewhere is not counted."""
        self._counts: dict[tuple[str, Rounded], Tensor] = {}
        self._sizes: dict[tuple[str, Rounded], tuple[int, int]] = {}

    def leaves_out(self, kind: Rounded) -> bool:
        """Everything is rounded."""
        return False

    def see(self, kind: Rounded, blocks: Tensor, scale: Tensor) -> None:
        """Counts blocks [..., n] with scales [..., 1]."""
        if self.layer is None:
            return
        with torch.no_grad():
            limits, magnitude = RANGES[kind], blocks.detach().abs()
            counts = torch.stack(
                [
                    (scale <= limits.floor).sum(),
                    (scale >= limits.ceiling).sum(),
                    (magnitude > limits.largest * scale).sum(),
                    (~magnitude.amax(-1).isfinite()).sum(),
                ]
            )
        key = (self.layer, kind)
        self._counts[key] = self._counts[key] + counts if key in self._counts else counts
        done = self._sizes.get(key, (0, 0))
        self._sizes[key] = (done[0] + scale.numel(), done[1] + blocks.numel())

    def counts(self) -> tuple[ScaleCount, ...]:
        """The counts so far, in the order in which layers and kinds were first seen."""
        if not self._counts:
            return ()
        rows = torch.stack(list(self._counts.values())).tolist()
        return tuple(
            ScaleCount(
                layer,
                kind,
                self._sizes[layer, kind][0],
                floor,
                ceiling,
                self._sizes[layer, kind][1],
                cut,
                bad,
            )
            for (layer, kind), (floor, ceiling, cut, bad) in zip(self._counts, rows, strict=True)
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
    fields = ("blocks", "floor", "ceiling", "values", "clipped", "nonfinite")
    sums = {name: getattr(total, name) + getattr(count, name) for name in fields}
    return ScaleCount(layer="all", kind=count.kind, **sums)


@contextmanager
def counting_scales(policy: Policy) -> Iterator[ScaleCounter]:
    """Counts what `policy` rounds inside its blocks, in this thread, until the context ends."""
    counter = ScaleCounter()
    modules: dict[str, nn.Module] = {str(block.layer): block for block in policy.blocks}
    if policy.mtp is not None:
        modules |= {f"mtp.{number}": block for number, block in enumerate(policy.mtp.blocks)}

    def leave(*_: object) -> None:
        counter.layer = None

    def enter(name: str):  # noqa: ANN202
        def set_layer(*_: object) -> None:
            counter.layer = name

        return set_layer

    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        with probing(counter):
            yield counter
    finally:
        for handle in handles:
            handle.remove()
