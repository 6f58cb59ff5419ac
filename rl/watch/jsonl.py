"""metrics.jsonl: the source of truth about a run's numbers, whatever else they are sent to.

One row holds one family at one step. After a kill or a loss of power the torn tail is cut off; when a resumed
run repeats a step, the later row counts.
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
        cut_torn_tail(path)
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


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file of JSON up to the first torn one; none without a file.

    A kill leaves a line without its end. A loss of power also leaves bytes of zero, where the file had grown
    but its pages were not on disk yet, maybe before lines that came later.
    """
    data = path.read_bytes() if path.exists() else b""
    return data[: whole_bytes(data)].decode().splitlines()


def cut_torn_tail(path: Path) -> None:
    """Cuts off what `whole_lines` leaves out, so that the next line is not written behind it."""
    data = path.read_bytes() if path.exists() else b""
    if (whole := whole_bytes(data)) < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def whole_bytes(data: bytes) -> int:
    """Returns how many bytes of a file of JSON those lines are."""
    zero = data.find(b"\0")
    return data.rfind(b"\n", 0, len(data) if zero < 0 else zero) + 1


def _rows(path: Path) -> Iterator[Row]:
    for line in whole_lines(path):
        data: dict[str, Any] = json.loads(line)
        metrics = {name: float(value) for name, value in data["metrics"].items()}
        yield Row(data["family"], data["step"], data["time"], metrics)


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
