"""What a run is judged by, in memory that does not grow with finished samples: sums and histograms."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np

_BINS = 4096
_PER_BIN = _BINS / math.log(1e9)


def length_bin(length: int) -> int:
    """The bin of a length: 4096 bins, even in the logarithm, 0.5 % wide."""
    return min(_BINS - 1, int(math.log(max(1, length)) * _PER_BIN))


def histogram(lengths: np.ndarray) -> np.ndarray:
    """Counts lengths in the bins of `length_bin`."""
    return np.bincount([length_bin(int(length)) for length in lengths], minlength=_BINS)


def ks_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance of two histograms with the same bins."""
    return float(np.abs(np.cumsum(a) / a.sum() - np.cumsum(b) / b.sum()).max())


def ks_noise(n: int, m: int) -> float:
    """The distance that two samples of one distribution exceed with probability 1 % (Smirnov's asymptote)."""
    return 1.628 * math.sqrt((n + m) / (n * m))


@dataclass(slots=True)
class Result:
    """Measures of one run between two weight updates, the last warm-up step's and the last step's.

    Tokens are trained ones within the staleness bound (`tokens`), beyond it (`masked`), or thrown away
    (`wasted`). `lags` counts tokens that carry loss by their lag in optimiser steps. `concurrency` and its
    square are integrals over time.
    """

    rule: str
    slots: int
    seconds: float = 0.0
    total_s: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    masked: int = 0
    wasted: int = 0
    busy: float = 0.0
    concurrency: float = 0.0
    concurrency2: float = 0.0
    trainer_busy_s: float = 0.0
    peak_live: int = 0
    dropped_groups: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=lambda: [0] * _BINS)
    early: list[int] = field(default_factory=lambda: [0] * _BINS)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that carry loss, a second."""
        return self.tokens / self.seconds

    @property
    def idle(self) -> float:
        """1 - mean running / slots; the pause of a weight update counts as idle."""
        return 1.0 - self.busy / (self.seconds * self.slots)

    @property
    def variation(self) -> float:
        """Standard deviation over mean of the running requests, over time."""
        mean = self.concurrency / self.seconds
        return math.sqrt(max(0.0, self.concurrency2 / self.seconds - mean * mean)) / max(mean, 1e-9)

    def lag(self, share: float) -> int:
        """The lag that this share of the tokens does not exceed."""
        left = share * self.lags.total()
        for lag in sorted(self.lags):
            left -= self.lags[lag]
            if left <= 0:
                return lag
        return max(self.lags, default=0)


def pool(results: list[Result]) -> Result:
    """Adds up the runs of one rule over seeds."""
    first, *others = results
    total = Result(first.rule, first.slots)
    for result in (first, *others):
        for name in _SUMS:
            setattr(total, name, getattr(total, name) + getattr(result, name))
        total.peak_live = max(total.peak_live, result.peak_live)
        total.lags.update(result.lags)
        total.lengths = [a + b for a, b in zip(total.lengths, result.lengths, strict=True)]
        total.early = [a + b for a, b in zip(total.early, result.early, strict=True)]
    return total


_SUMS = [
    f.name for f in fields(Result) if f.type in ("int", "float") and f.name not in ("slots", "peak_live")
]
