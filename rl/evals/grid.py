"""Effort against scaffold: where more effort scored less, and the least effort that is nearly the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl.evals.statistics import Estimate, paired_difference
from rl.evals.summary import CellResult

NEARLY = 0.95


@dataclass(frozen=True, slots=True)
class Fall:
    """A pair of efforts that is not monotone: `high` scored less than `low` on the same tasks.

    `significant`: the interval of the paired difference lies below 0.
    """

    env: str
    scaffold: str
    low: int
    high: int
    difference: Estimate

    @property
    def significant(self) -> bool:
        """Whether the fall is more than noise."""
        return self.difference.high < 0

    def __str__(self) -> str:
        word = "significant" if self.significant else "within noise"
        gap = self.difference
        return (
            f"{self.env}, {self.scaffold}: effort {self.high} scores less than {self.low} by {-gap.mean:.3f} "
            f"[{-gap.high:.3f}, {-gap.low:.3f}] ({word})"
        )


@dataclass(frozen=True, slots=True)
class Enough:
    """The smallest effort that reaches 95 % of the best one's score, and the tokens of both."""

    env: str
    scaffold: str
    effort: int
    best: int
    score: float
    best_score: float
    tokens: float
    best_tokens: float

    def __str__(self) -> str:
        return (
            f"{self.env}, {self.scaffold}: effort {self.effort} reaches {NEARLY:.0%} of the best "
            f"({self.score:.3f} of "
            f"{self.best_score:.3f} at {self.best}) with {self.tokens:.1f} of {self.best_tokens:.1f} tokens "
            "a sample"
        )


def falls(results: Sequence[CellResult]) -> list[Fall]:
    """All pairs of efforts of an environment and scaffold where the higher one scored less."""
    found: list[Fall] = []
    for ladder in _ladders(results):
        for place, low in enumerate(ladder):
            for high in ladder[place + 1 :]:
                gap = paired(low, high)
                if gap.mean < 0:
                    cell = low.cell
                    found.append(Fall(cell.env, cell.scaffold, cell.effort, high.cell.effort, gap))
    return found


def enough(results: Sequence[CellResult]) -> list[Enough]:
    """For each environment and scaffold, the smallest effort with 95 % of the best score, if not 0."""
    found: list[Enough] = []
    for ladder in _ladders(results):
        best = max(ladder, key=lambda result: result.avg.mean)
        if best.avg.mean <= 0:
            continue
        least = next(result for result in ladder if result.avg.mean >= NEARLY * best.avg.mean)
        cell, top = least.cell, best.cell.effort
        means = (least.avg.mean, best.avg.mean, least.tokens, best.tokens)
        found.append(Enough(cell.env, cell.scaffold, cell.effort, top, *means))
    return found


def paired(first: CellResult, second: CellResult) -> Estimate:
    """The difference, second - first, over the tasks that both have a score of."""
    pairs = [
        (a, b) for a, b in zip(first.scores, second.scores, strict=True) if a is not None and b is not None
    ]
    return paired_difference([a for a, _ in pairs], [b for _, b in pairs])


def _ladders(results: Sequence[CellResult]) -> Iterator[list[CellResult]]:
    """The results with a score of each environment and scaffold, by effort; two at least."""
    for name in sorted({(result.cell.env, result.cell.scaffold) for result in results}):
        ladder = [r for r in results if (r.cell.env, r.cell.scaffold) == name and r.avg.n]
        if len(ladder) > 1:
            yield sorted(ladder, key=lambda result: result.cell.effort)
