"""Two RL teachers distilled into one student: `python -m benchmarks.opd [--runs FOLDER]`.

Trains a teacher of `calc` and one of `sort` by RL, then runs `temper train experiment=opd_calc`, and
evaluates all three on the same tasks with the same seeds. Exits 1 when the student misses a figure.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.learning import Check, Row, evaluate, metrics, options, runs_folder, train

TASKS = ("calc", "sort")
STUDENT = "opd-student"
SHARE, CALC = 0.95, 0.90
WINDOWS, NOISE, FALL = 4, 2.0, 0.5
"""Parts of the distillation whose mean KL must fall; how many standard errors one may seem to rise, as a step
has a few tokens of great KL; and the last part's share of the first."""


def main() -> int:
    """Trains what is not there, evaluates, and prints each figure; the last line has the student's shares."""
    arguments = options("opd", __doc__).parse_args()
    with runs_folder(arguments.runs) as root:
        for task in TASKS:
            train(root, task, [f"experiment={task}"])
        train(root, STUDENT, ["experiment=opd_calc", *arguments.overrides])
        checks = _checks(root)
    for check in checks:
        print(check)
    held = sum(check.held for check in checks)
    shares = ", ".join(f"{check.name} {check.value:.3f}" for check in checks[: len(TASKS)])
    print(f"opd: {shares}; {held}/{len(checks)} figures hold")
    return 0 if held == len(checks) else 1


def _checks(root: Path) -> list[Check]:
    settings = ["n=300", "k=4", "max_completion_tokens=12"]
    pupil = evaluate(root, STUDENT, root / "eval-student", [f"env=[{','.join(TASKS)}]", *settings])
    teachers = {
        task: evaluate(root, task, root / f"eval-{task}", [f"env={task}", *settings])[task] for task in TASKS
    }
    steps = {name: _steps(root / name, family) for name, family in _stages()}
    kl = [row["metrics"]["opd/kl"] for row in metrics(root / STUDENT, "opd")]
    return figures(pupil, teachers, steps, kl)


def figures(
    pupil: Mapping[str, Row], teachers: Mapping[str, Row], steps: Mapping[str, float], kl: Sequence[float]
) -> list[Check]:
    """The figures, from evaluations by environment, the optimiser steps of the runs and the KL of each step.

    The student must take fewer steps than RL took, even of the teacher that took the fewest.
    """
    scores = {task: pupil[task]["avg"]["mean"] for task in TASKS}
    shares = {task: scores[task] / teachers[task]["avg"]["mean"] for task in TASKS}
    fewest = min(steps[task] for task in TASKS)
    return [
        *(Check(f"share of the {t} teacher's accuracy", shares[t], SHARE, at_most=False) for t in TASKS),
        Check("student on calc", scores["calc"], CALC, at_most=False),
        Check("steps, against the shorter RL", steps[STUDENT], fewest - 1, at_most=True),
        Check("largest rise of the smoothed KL, in standard errors", rise(kl), NOISE, at_most=True),
        Check("smoothed KL, the last part against the first", kept(kl), FALL, at_most=True),
        Check("samples without a score", sum(c["n"] - c["n_valid"] for c in pupil.values()), 0, at_most=True),
    ]


def rise(values: Sequence[float]) -> float:
    """The largest rise from one part to the next of `WINDOWS`, in standard errors; below 0 when all fall."""
    rises: list[float] = []
    for before, after in itertools.pairwise(_parts(values)):
        error = math.sqrt(sum(statistics.variance(part) / len(part) for part in (before, after)))
        rises.append((statistics.mean(after) - statistics.mean(before)) / max(error, 1e-12))
    return max(rises)


def kept(values: Sequence[float]) -> float:
    """The mean of the last of `WINDOWS` parts over that of the first."""
    first, *_, last = _parts(values)
    return statistics.mean(last) / statistics.mean(first)


def _parts(values: Sequence[float]) -> list[Sequence[float]]:
    edges = [len(values) * part // WINDOWS for part in range(WINDOWS + 1)]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def _stages() -> list[tuple[str, str]]:
    return [*((task, "train") for task in TASKS), (STUDENT, "opd")]


def _steps(run: Path, family: str) -> float:
    return float(max(row["step"] for row in metrics(run, family)))


if __name__ == "__main__":
    sys.exit(main())
