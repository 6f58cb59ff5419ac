"""Estimators and intervals of an evaluation. A task is the unit: its samples are not independent.

All values of a task are means over its scored samples; a task without one is not in the statistic at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
_Z = 1.959963984540054
_SEED = 20_261_129


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` tasks with its 95 % interval, and how that was found. NaN when `n` is 0."""

    mean: float
    low: float
    high: float
    n: int
    method: str

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples solves a task (Chen et al. 2021, eq. 1).

    1 - C(samples - solved, k) / C(samples, k).

    Raises:
        ValueError: k is not in 1..samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of a task, there are {samples}")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def average(tasks: Sequence[Sequence[float]]) -> Estimate:
    """avg@k: the mean score of a task, over tasks. Samples are grouped by task; empty tasks do not count."""
    return estimate([sum(values) / len(values) for values in tasks if values], _binary_single(tasks))


def solved_by_one_of(tasks: Sequence[Sequence[float]], k: int, threshold: float) -> Estimate:
    """pass@k over the tasks with at least k scored samples; a score of `threshold` or more solves one."""
    solved = [(len(values), sum(value >= threshold for value in values)) for values in tasks]
    kept = [pass_at_k(samples, count, k) for samples, count in solved if samples >= k]
    return estimate(kept, k == 1 and _binary_single(tasks))


def estimate(values: Sequence[float], binary: bool = False) -> Estimate:
    """The mean of one value a task.

    The interval is Wilson's when each value is one draw of 0 or 1, or when all are equal (0 or 1), where
    resampling would claim certainty; else it is the percentile bootstrap over tasks.
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan, 0, "none")
    array = np.asarray(values, np.float64)
    mean, count = float(array.mean()), len(array)
    if binary or (mean in (0.0, 1.0) and bool((array == mean).all())):
        return Estimate(mean, *wilson(mean, count), count, "wilson")
    return Estimate(mean, *bootstrap(array), count, "bootstrap")


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` independent draws."""
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    low = 0.0 if share == 0 else max(0.0, centre - half)
    return low, 1.0 if share == 1 else min(1.0, centre + half)


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    """Percentile interval of the mean of `values` [n] over 2,000 resamples of a fixed seed."""
    draw = np.random.default_rng(_SEED)
    count = len(values)
    means = np.concatenate(
        [values[draw.integers(0, count, size=(50, count))].mean(axis=1) for _ in range(RESAMPLES // 50)]
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The mean of second - first over the same tasks, with the bootstrap interval of the pairs."""
    if not first:
        return Estimate(math.nan, math.nan, math.nan, 0, "none")
    gaps = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    return Estimate(float(gaps.mean()), *bootstrap(gaps), len(gaps), "paired bootstrap")


def by_deadline(
    tasks: Sequence[Sequence[tuple[float, float]]], deadline_s: float
) -> tuple[tuple[float, ...], ...]:
    """Scores as they stand at a deadline: a sample of (score, seconds) that took longer has nothing, 0."""
    at: Callable[[tuple[float, float]], float] = partial(_at, deadline_s)
    return tuple(tuple(at(sample) for sample in samples) for samples in tasks)


def _at(deadline_s: float, sample: tuple[float, float]) -> float:
    score, seconds = sample
    return score if seconds <= deadline_s else 0.0


def _binary_single(tasks: Sequence[Sequence[float]]) -> bool:
    return all(len(values) <= 1 and all(value in (0.0, 1.0) for value in values) for values in tasks)
