"""A measured figure, what it must show, and how a table of them is printed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a part, with the bound it must keep: at most `most` or at least `least`, if any."""

    part: str
    name: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it keeps its bounds."""
        return (self.most is None or self.value <= self.most) and (
            self.least is None or self.value >= self.least
        )

    def row(self) -> str:
        """Returns its line in the table."""
        bound = f"<= {self.most:g}" if self.most is not None else ""
        bound = f">= {self.least:g}" if self.least is not None else bound
        mark = ("held" if self.holds else "MISSED") if bound else ""
        what = f"{self.part:<9} {self.name:<46} {self.value:>9.2f} {self.unit:<5}"
        return f"{what} {bound:<9} {mark:<7}{self.note}"


def table(figures: Sequence[Figure]) -> None:
    """Prints figures, a line each."""
    for figure in figures:
        print(figure.row())


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    """Returns how many milliseconds a call takes."""
    start = time.perf_counter()
    await call()
    return 1e3 * (time.perf_counter() - start)


def p50(times: Sequence[float]) -> float:
    """Returns the median."""
    return statistics.median(times)


def p95(times: Sequence[float]) -> float:
    """Returns the 95th percentile."""
    return statistics.quantiles(times, n=20)[-1]
