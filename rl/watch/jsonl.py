"""metrics.jsonl: the source of truth about a run's numbers, whatever else they are sent to.

One row holds one family at one step. After a kill the torn last row is cut off; when a resumed run repeats a
step, the later row counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers of one family at one step of its own axis; `time` is seconds since the epoch."""

    family: str
    step: int
    time: float
    metrics: Mapping[str, float]


class JsonlLog:
    """Appends rows; each is in the file when `write` returns."""

    def __init__(self, path: Path) -> None:
        _cut_torn_row(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Row) -> None:
        """Appends one row."""
        metrics = {name: _number(value) for name, value in row.metrics.items()}
        data = {"family": row.family, "step": row.step, "time": round(row.time, 3), "metrics": metrics}
        self._file.write(json.dumps(data) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def row(family: str, step: int, metrics: Mapping[str, float]) -> Row:
    """Returns a row with the present time."""
    return Row(family, step, time.time(), dict(metrics))


def read_rows(path: Path) -> list[Row]:
    """Returns the rows in file order; a torn last row is left out."""
    return list(_rows(path))


def series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of one metric, ascending in step; the newest value of a step counts."""
    points = {entry.step: entry.metrics[name] for entry in rows if name in entry.metrics}
    steps = sorted(points)
    return steps, [points[step] for step in steps]


def _rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            data: dict[str, Any] = json.loads(line)
            metrics = {name: float(value) for name, value in data["metrics"].items()}
            yield Row(data["family"], data["step"], data["time"], metrics)


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _cut_torn_row(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
