"""One line of a file for each sample of an evaluation: what interrupts it loses nothing that was finished."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from envs.types import Missing, Trajectory
from rl.rollout.buffer import outcome
from rl.watch.jsonl import whole_bytes


class RowsError(ValueError):
    """A file of rows that cannot be used: which, and why."""


class DiskError(RuntimeError):
    """Rows or a report cannot be written: where, why, and that nothing that was written is lost."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """Where a sample belongs: an environment, an effort and a scaffold."""

    env: str
    effort: int
    scaffold: str

    def __str__(self) -> str:
        return f"{self.env} effort {self.effort} {self.scaffold}"


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. `score` is None when there is no verdict, and then `missing` says why and where.

    `seconds` is from its start to its verdict; `input_tokens` are prompt and observations, `sandbox_s` how
    long it held a sandbox. `version` is the step of the weights that sampled every token of it.
    """

    cell: Cell
    task: int
    sample: int
    attempt: int
    task_id: str
    version: int
    score: float | None
    missing: str
    parts: Mapping[str, float]
    status: str
    stop: str
    turns: int
    tool_calls: int
    input_tokens: int
    output_tokens: int
    seconds: float
    sandbox_s: float

    @property
    def place(self) -> tuple[Cell, int, int]:
        """Which of the planned samples it is."""
        return self.cell, self.task, self.sample


def row_of(trajectory: Trajectory, cell: Cell, version: int, *, own_sandbox: bool) -> Row:
    """Returns what is kept of a finished trajectory; `own_sandbox`: it held one for its whole life.

    Raises:
        RowsError: A token was sampled by other weights than those of `version`.
    """
    key, score, timings = trajectory.key, trajectory.score, trajectory.timings
    if set(trajectory.policy_versions) - {version}:
        raise RowsError(
            f"{key} holds tokens of versions {trajectory.policy_versions}, but version {version} is evaluated"
        )
    total = timings.get("total_s", 0.0)
    held = total - timings.get("score_s", 0.0) if own_sandbox else timings.get("tool_s", 0.0)
    return Row(
        cell=cell,
        task=key.group,
        sample=key.index,
        attempt=key.attempt,
        task_id=key.task,
        version=version,
        score=None if isinstance(score, Missing) else outcome(score),
        missing=f"{score.boundary}: {score.reason}" if isinstance(score, Missing) else "",
        parts={} if isinstance(score, Missing) else dict(score.parts),
        status=str(trajectory.status),
        stop=str(trajectory.stop),
        turns=len(trajectory.turns),
        tool_calls=sum(len(turn.message.tool_calls) for turn in trajectory.turns),
        input_tokens=sum(len(turn.prompt_ids) for turn in trajectory.turns),
        output_tokens=trajectory.sampled_tokens,
        seconds=total,
        sandbox_s=max(held, 0.0),
    )


@dataclass(slots=True)
class Rows:
    """What the file of an evaluation holds: the newest row of each sample, and device seconds by cell."""

    rows: dict[tuple[Cell, int, int], Row] = field(default_factory=dict)
    device_s: dict[Cell, float] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Takes a row; a later one of the same sample replaces it."""
        self.rows[row.place] = row

    def used(self, cell: Cell, seconds: float) -> None:
        """Books seconds in which the device worked for a cell."""
        self.device_s[cell] = self.device_s.get(cell, 0.0) + seconds

    def of(self, cell: Cell) -> list[Row]:
        """The rows of a cell, by task and sample."""
        return [self.rows[place] for place in sorted(self.rows) if place[0] == cell]


class RowLog:
    """Appends to a file of rows that one process at a time may write; reads what is there first.

    Raises:
        RowsError: Another process writes it, or a line that is not the last cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise RowsError(
                f"{path} is being written by another process; wait for it or give out="
            ) from error
        try:
            self.found = self._recover()
        except BaseException:
            self._file.close()
            raise

    def _recover(self) -> Rows:
        """Reads all rows; what a kill or a loss of power left behind them is removed."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: whole_bytes(data)]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        return parse_rows(whole.decode("utf-8", "replace"), self.path)

    def write(self, rows: Sequence[Row], cell: Cell, device_s: float) -> None:
        """Appends rows of a cell and the device's seconds since the last call, all of them or none.

        Raises:
            DiskError: They cannot be written; the file is as it was.
        """
        lines = [{"row": asdict(row)} for row in rows]
        lines.append({"used": {"cell": asdict(cell), "device_s": device_s}})
        self._append("".join(f"{json.dumps(line)}\n" for line in lines).encode())
        for row in rows:
            self.found.add(row)
        self.found.used(cell, device_s)

    def _append(self, data: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())  # the weights that could draw them anew are let go at the end
        except OSError as error:
            self._file.truncate(end)
            raise DiskError(
                f"{self.path} cannot be written ({error.strerror}); what it holds is kept. Make room, and "
                f"`temper eval {self.path.parent}` draws the rest"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_rows(path: Path) -> Rows:
    """Reads a file of rows; a last line that is not complete does not count.

    Raises:
        RowsError: It is not there, or cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RowsError(
            f"{path} cannot be read ({error.strerror}); is this the folder of an evaluation?"
        ) from error
    return parse_rows(data[: whole_bytes(data)].decode("utf-8", "replace"), path)


def parse_rows(text: str, path: Path) -> Rows:
    """Reads lines of rows.

    Raises:
        RowsError: A line is not one.
    """
    found = Rows()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            data = json.loads(line)
            if "row" in data:
                found.add(_row(data["row"]))
            else:
                found.used(Cell(**data["used"]["cell"]), float(data["used"]["device_s"]))
        except (ValueError, KeyError, TypeError) as error:
            raise RowsError(
                f"{path}, line {number} is no row of an evaluation ({type(error).__name__}: {error}); "
                f"remove the line, and `temper eval {path.parent}` draws its sample again"
            ) from error
    return found


def _row(data: dict[str, Any]) -> Row:
    row = Row(**{**data, "cell": Cell(**data["cell"])})
    if row.score is not None and not math.isfinite(row.score):
        raise ValueError(f"a score of {row.score}")
    return row
