"""What reinforcement adds to imitation on `sort`: `python -m benchmarks.sort [--seeds 0 1] [--runs FOLDER]`.

Each seed runs `temper train experiment=sort`. The figure is the gain in sampled accuracy over the warm
start, on tasks of which no letters are in the training split. Exits 1 when a figure is missed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.learning import Check, Row, evaluations, on_seeds, train

GAIN = 0.10


def main() -> int:
    """Runs all seeds and prints each figure; the last line has the smallest gain."""
    checks, _ = on_seeds("sort", __doc__, _seed)
    gains = [check.value for check in checks if check.name == "gain of sampled accuracy"]
    held = sum(check.held for check in checks)
    print(f"sort: gain {min(gains):.3f} over the warm start; {held}/{len(checks)} figures hold")
    return 0 if held == len(checks) else 1


def _seed(seed: int, root: Path, overrides: list[str]) -> list[Check]:
    name = f"sort-{seed}"
    seconds = train(root, name, ["experiment=sort", f"run.seed={seed}", *overrides])
    rows = evaluations(root / name, "sort")
    return figures(rows[0], rows[max(rows)], seconds)


def figures(before: Row, after: Row, seconds: float) -> list[Check]:
    """The figures of one run, from its evaluations after the warm start and at the end."""
    sampled = [row["sampled/score.mean"] for row in (before, after)]
    return [
        Check("sampled after the warm start", sampled[0], 0.85, at_most=True),
        Check("sampled", sampled[1], 0.5, at_most=False),
        Check("gain of sampled accuracy", sampled[1] - sampled[0], GAIN, at_most=False),
        Check("samples without a score", after["sampled/n"] - after["sampled/n_valid"], 0, at_most=True),
        Check("mismatch, mean", after["kl.mismatch.mean"], 1e-3, at_most=True),
        Check("seconds", seconds, 720, at_most=True),
    ]


if __name__ == "__main__":
    sys.exit(main())
