"""Which efforts a task is drawn at: a pure function of the seed, so that a resume repeats it.

Levels alone teach a policy those levels. Efforts drawn from the whole range between them teach it what the
digits mean; `held_out` keeps some unseen, to tell whether it interpolates.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["ladder", "weighted", "uniform", "log_uniform"]

_POOL = 2000


class EffortError(ValueError):
    """Levels or a distribution of efforts that cannot be drawn from: what, and what to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortDistribution:
    """How efforts are drawn; a task is drawn as often as there are levels.

    Attributes:
        kind: `ladder` takes each level once a task, `weighted` draws levels by `weights`, `uniform` and
            `log_uniform` draw integers between `low` and `high`.
        weights: of the levels, for `weighted` only.
        low: the least effort of the uniform kinds.
        high: the greatest effort of the uniform kinds.
        levels_share: the share of a task's draws of the uniform kinds that is a level of the ladder instead.
        held_out: efforts that the uniform kinds never draw.
        per_task: how often a task is drawn, the levels in turn; null: as often as there are levels. Fewer
            draws of more tasks make a step's gradient less noisy where luck lies in the task.
    """

    kind: Kind = "ladder"
    weights: tuple[float, ...] = ()
    low: int = 1
    high: int = 100
    levels_share: float = 0.0
    held_out: tuple[int, ...] = ()
    per_task: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("ladder", "weighted", "uniform", "log_uniform"):
            raise EffortError(
                f"effort.distribution.kind is {self.kind!r}; it is ladder, weighted, uniform or log_uniform"
            )
        if bool(self.weights) != (self.kind == "weighted"):
            raise EffortError(
                f"effort.distribution.weights={list(self.weights)} with kind={self.kind}: weights belong to "
                "kind=weighted, which needs one for each level"
            )
        if self.per_task is not None and self.per_task < 1:
            raise EffortError(
                f"effort.distribution.per_task={self.per_task}: set it to 1 or more, or leave it out"
            )
        if any(not 0 <= weight < math.inf for weight in self.weights) or (
            self.weights and not any(self.weights)
        ):
            raise EffortError(f"effort.distribution.weights={list(self.weights)}: 0 or more, not all 0")
        if self.kind in ("uniform", "log_uniform"):
            self._check_range()
        elif (self.low, self.high, self.levels_share, self.held_out) != (1, 100, 0.0, ()):
            raise EffortError(
                f"effort.distribution: low, high, levels_share and held_out have no effect with "
                f"kind={self.kind}; leave them out, or set kind=uniform or log_uniform"
            )

    def _check_range(self) -> None:
        if not 1 <= self.low <= self.high <= 100:
            raise EffortError(
                f"effort.distribution: low={self.low}, high={self.high}; set 1 <= low <= high <= 100"
            )
        if not 0 <= self.levels_share <= 1:
            raise EffortError(f"effort.distribution.levels_share={self.levels_share}: set it between 0 and 1")
        if strangers := [b for b in self.held_out if not self.low <= b <= self.high]:
            raise EffortError(
                f"effort.distribution.held_out has {strangers}, which lie outside {self.low}..{self.high} "
                "and are never drawn anyway; remove them"
            )
        if len(set(self.held_out)) == self.high - self.low + 1:
            raise EffortError("effort.distribution.held_out leaves no effort to draw; hold out fewer")


class Efforts:
    """The efforts of every task of a run.

    Args:
        levels: ascending, 1..100.
        distribution: how efforts are drawn.
        seed: of the draws.

    Raises:
        EffortError: The weights are not one for each level, or a level is held out and drawn too.
    """

    def __init__(self, levels: Sequence[int], distribution: EffortDistribution, seed: int) -> None:
        if distribution.kind == "weighted" and len(distribution.weights) != len(levels):
            raise EffortError(
                f"effort.distribution.weights has {len(distribution.weights)} numbers for {len(levels)} "
                "levels; give one for each"
            )
        if both := sorted(set(levels) & set(distribution.held_out)):
            raise EffortError(f"efforts {both} are levels and held out; remove them from one of the two")
        self.levels, self._distribution, self._seed = tuple(levels), distribution, seed
        span = range(distribution.low, distribution.high + 1)
        self._values = [b for b in span if b not in distribution.held_out]
        log = distribution.kind == "log_uniform"
        self._shares = [math.log((b + 1) / b) if log else 1.0 for b in self._values]

    @staticmethod
    def of(efforts: Efforts | Sequence[int]) -> Efforts:
        """Returns efforts as they are; plain levels are a ladder."""
        return efforts if isinstance(efforts, Efforts) else Efforts(efforts, EffortDistribution(), 0)

    def __len__(self) -> int:
        """How often a task is drawn."""
        return self._distribution.per_task or len(self.levels)

    def of_task(self, index: int) -> tuple[int, ...]:
        """Returns the efforts at which the `index`-th task is drawn."""
        kind, share, count = self._distribution.kind, self._distribution.levels_share, len(self)
        levels = tuple(self.levels[(index * count + i) % len(self.levels)] for i in range(count))
        if kind == "ladder":
            return levels
        draw = random.Random(f"efforts/{self._seed}/{index}")
        if kind == "weighted":
            return tuple(draw.choices(self.levels, self._distribution.weights, k=count))
        free = draw.choices(self._values, self._shares, k=count)
        return tuple(
            level if draw.random() < share else other for level, other in zip(levels, free, strict=True)
        )

    def pool(self) -> tuple[int, ...]:
        """Returns many draws, distributed as the tasks', for whoever picks one at a time."""
        if self._distribution.kind == "ladder":
            return self.levels
        tasks = range(math.ceil(_POOL / len(self)))
        return tuple(effort for index in tasks for effort in self.of_task(-1 - index))
