"""What one step computes: the rows that decode, and fair shares of prefill in batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from model.engine.rows import Rows


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows that decode, int64 [n], and batches of rows [b] with their tokens to prefill [b].

    A row that decodes has room for `each` tokens: the last one and drafts that follow it.
    """

    decoding: np.ndarray
    prefill: list[tuple[np.ndarray, np.ndarray]]
    each: int = 1

    def flat(self, table: Rows) -> tuple[list[int], list[int]]:
        """All rows of the step and their new tokens at most."""
        rows = self.decoding.tolist()
        new = np.minimum(self.each, (table.limit - table.length)[self.decoding]).tolist()
        for batch, shares in self.prefill:
            rows += batch.tolist()
            new += shares.tolist()
        return rows, new


def split_prefill(rows: Rows, prefilling: list[int], budget: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Splits `budget` tokens of prefill over rows, max-min fairly; rows with similar shares go together."""
    numbers = np.array(prefilling, np.int64)
    missing = rows.length[numbers] - rows.cached[numbers]
    order = np.argsort(missing, kind="stable")
    shares = _fair_shares(missing[order], budget)
    return [(numbers[order[a:b]], shares[a:b]) for a, b in _similar(shares)]


def _fair_shares(missing: np.ndarray, budget: int) -> np.ndarray:
    """Returns max-min fair shares of `budget` for needs in ascending order, at least one token each."""
    shares = np.zeros_like(missing)
    for i, need in enumerate(missing.tolist()):
        shares[i] = min(need, max(1, budget // (missing.size - i)))
        budget -= int(shares[i])
    return shares


def _similar(shares: np.ndarray) -> Iterator[tuple[int, int]]:
    """Splits ascending shares into runs whose largest is at most twice their smallest (or at most 8)."""
    begin = 0
    for i in range(1, shares.size + 1):
        if i == shares.size or shares[i] > max(2 * shares[begin], 8):
            yield begin, i
            begin = i
