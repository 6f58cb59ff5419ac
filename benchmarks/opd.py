"""Two RL teachers distilled into one student: `python -m benchmarks.opd [--teachers RUNS]`.

Trains a teacher of `calc` and one of `sort` by RL (or takes the runs `calc` and `sort` of a folder), then
`temper train experiment=opd_calc`, and evaluates all three on the same tasks with the same seeds. Exits 1
when the student misses a figure.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.calc import Check, Row
from benchmarks.learning import evaluate, metrics, train

TASKS = ("calc", "sort")
SHARE, CALC = 0.95, 0.90
WINDOWS = 5


def main() -> int:
    """Trains what is not there, evaluates, and prints each figure; the last line has the student's shares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.opd", description=__doc__)
    parser.add_argument("--teachers", type=Path, help="a folder of runs that has finished runs calc and sort")
    parser.add_argument("--student", default="", help="a finished run of that folder to judge, not a new one")
    parser.add_argument("overrides", nargs="*", help="further overrides of the student, such as opd.steps=80")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.teachers or Path(folder)
        if arguments.teachers is None:
            for task in TASKS:
                train(root, task, [f"experiment={task}"])
        student = arguments.student or "opd-student"
        if not arguments.student:
            train(root, student, ["experiment=opd_calc", "run.clean=true", *arguments.overrides])
        checks = _checks(root, student, Path(folder))
    for check in checks:
        print(check)
    held = sum(check.held for check in checks)
    shares = ", ".join(f"{check.name} {check.value:.3f}" for check in checks[: len(TASKS)])
    print(f"opd: {shares}; {held}/{len(checks)} figures hold")
    return 0 if held == len(checks) else 1


def _checks(root: Path, student: str, folder: Path) -> list[Check]:
    settings = ["n=200", "k=2", "max_completion_tokens=12"]
    pupil = evaluate(root, student, folder / "student", [f"env=[{','.join(TASKS)}]", *settings])
    scores = {task: pupil[task]["avg"]["mean"] for task in TASKS}
    teachers = {task: evaluate(root, task, folder / task, [f"env={task}", *settings])[task] for task in TASKS}
    steps = _steps(root / student, "opd")
    return [
        *_shares(scores, teachers),
        Check("student on calc", scores["calc"], CALC, at_most=False),
        *(
            Check(f"steps, against {task}'s", steps, _steps(root / task, "train") - 1, at_most=True)
            for task in TASKS
        ),
        Check("largest rise of the smoothed KL", _rise(_kl(root / student)), 0.0, at_most=True),
        Check("samples without a score", sum(c["n"] - c["n_valid"] for c in pupil.values()), 0, at_most=True),
    ]


def _shares(scores: Mapping[str, float], teachers: Mapping[str, Row]) -> list[Check]:
    return [
        Check(
            f"share of the {task} teacher's accuracy",
            scores[task] / teachers[task]["avg"]["mean"],
            SHARE,
            at_most=False,
        )
        for task in TASKS
    ]


def _steps(run: Path, family: str) -> float:
    return float(max(row["step"] for row in metrics(run, family)))


def _kl(run: Path) -> list[float]:
    return [row["metrics"]["opd/kl"] for row in metrics(run, "opd")]


def _rise(values: Sequence[float]) -> float:
    """The largest rise between means of `WINDOWS` consecutive parts; below 0 when they fall throughout."""
    size = len(values) // WINDOWS
    means = [sum(values[i * size : (i + 1) * size]) / size for i in range(WINDOWS)]
    return max(b - a for a, b in itertools.pairwise(means))


if __name__ == "__main__":
    sys.exit(main())
