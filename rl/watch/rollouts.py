"""The samples of a run on disk: one JSONL file a training step, one line a trajectory, and the failed ones.

A line has the task, the tokens with their log-probabilities and versions, the verdict, and `min_version`:
tokens of older versions, prompts and observations carried no loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.types import Missing, Task, Trajectory
from model.durable import sync
from rl.rollout.codec import task_from_json, task_to_json, trajectory_from_json, trajectory_to_json
from rl.watch.jsonl import cut_torn_tail, whole_lines
from rl.watch.metrics import TrainingBatch

FOLDER = "rollouts"
_FAILED, _DISPATCHED = "failed.jsonl", "dispatched.jsonl"


class NoRolloutsError(ValueError):
    """There is nothing to show: what was looked for, and what there is."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory as it was trained on. `task` is None for a failed one."""

    trajectory: Trajectory
    task: Task | None
    min_version: int

    @property
    def reward(self) -> float:
        """Its score; NaN without one."""
        score = self.trajectory.score
        return float("nan") if isinstance(score, Missing) else score.value


class RolloutLog:
    """Writes samples below the run's folder."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in (_FAILED, _DISPATCHED):
            cut_torn_tail(self._folder / name)
        self._unsynced: list[Path] = []

    def step(self, step: int, batch: TrainingBatch) -> None:
        """Writes the samples of one optimiser step; a resumed run that repeats the step replaces them."""
        oldest = int(getattr(batch, "min_version", 0))
        lines = [
            json.dumps(
                {"min_version": oldest, "task": task_to_json(group.task), "trajectory": trajectory_to_json(t)}
            )
            for group in batch.groups
            for t in group.trajectories
        ]
        path = self._folder / f"step-{step:06d}.jsonl"
        partial = path.with_suffix(".partial")
        partial.write_text("\n".join(lines) + "\n" * bool(lines), encoding="utf-8")
        partial.replace(path)
        self._unsynced.append(path)

    def dispatched(self, group: int, task: str, effort: int) -> None:
        """Appends which task a group has; groups stand in the order in which they were dispatched.

        A resumed run dispatches those again that its checkpoint does not know: they stand there twice.
        """
        with (self._folder / _DISPATCHED).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"group": group, "task": task, "effort": effort}) + "\n")

    def sync(self) -> None:
        """Waits until all that was written is on disk."""
        paths, self._unsynced = [*self._unsynced, *self._folder.glob("*ed.jsonl"), self._folder], []
        for path in paths:
            sync(path)

    def failed(self, trajectory: Trajectory) -> None:
        """Appends a sample that could not be used, with its error."""
        with (self._folder / _FAILED).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"min_version": 0, "trajectory": trajectory_to_json(trajectory)}) + "\n")


def steps(run: Path) -> list[int]:
    """Returns the steps that have samples, ascending."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (run / FOLDER).glob("step-*.jsonl"))


def read(run: Path, step: int | None = None, *, failed: bool = False) -> list[Sample]:
    """Returns the samples of a step (the last one by default), or the failed ones of the run.

    Raises:
        NoRolloutsError: There are none.
    """
    if failed:
        return list(_samples(run / FOLDER / _FAILED))
    known = steps(run)
    if not known or (step is not None and step not in known):
        wanted = f"step {step}" if step is not None else "any step"
        there = f"there are samples of steps {known[0]} to {known[-1]}" if known else "no step has any yet"
        raise NoRolloutsError(f"run {run.name!r} has no samples of {wanted}; {there}")
    return list(_samples(run / FOLDER / f"step-{known[-1] if step is None else step:06d}.jsonl"))


def _samples(path: Path) -> Iterator[Sample]:
    for line in whole_lines(path):
        data: dict[str, Any] = json.loads(line)
        task = task_from_json(data["task"]) if "task" in data else None
        yield Sample(trajectory_from_json(data["trajectory"]), task, data["min_version"])
