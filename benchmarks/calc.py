"""The main job on several seeds: `python -m benchmarks.calc [--seeds 0 1] [--runs FOLDER]`.

Each seed runs `temper train experiment=calc` and the same with learning rate 0, whose samples are drawn with
the same seeds and must score as after the warm start. Exits 1 when a figure is missed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.learning import Check, Row, evaluations, metrics, on_seeds, train

_STILL = ("trainer.optimizer.learning_rate=0", "trainer.steps=5")


def main() -> int:
    """Runs all seeds and prints each figure; the last line counts those that held."""
    checks, seeds = on_seeds("calc", __doc__, _seed)
    held = sum(check.held for check in checks)
    print(f"calc: {held}/{len(checks)} figures hold on {seeds} seeds")
    return 0 if held == len(checks) else 1


def _seed(seed: int, root: Path, overrides: list[str]) -> list[Check]:
    common = ["experiment=calc", f"run.seed={seed}", *overrides]
    before, after, seconds = _run(root, f"calc-{seed}", common)
    control_before, control, _ = _run(root, f"still-{seed}", [*common, *_STILL])
    drift = abs(control["sampled/score.mean"] - control_before["sampled/score.mean"])
    return [
        Check("sampled after the warm start", before["sampled/score.mean"], 0.45, at_most=True),
        Check("greedy after the warm start", before["greedy/score.mean"], 0.1, at_most=True),
        Check("sampled", after["sampled/score.mean"], 0.90, at_most=False),
        Check("greedy", after["greedy/score.mean"], 0.95, at_most=False),
        Check("tool use", after["sampled/tool_use"], 0.95, at_most=False),
        Check("samples", after["sampled/n_valid"], 400, at_most=False),
        Check("samples without a score", after["sampled/n"] - after["sampled/n_valid"], 0, at_most=True),
        Check("errors in training", _errors(root / f"calc-{seed}"), 0, at_most=True),
        Check("mismatch, median", after["kl.mismatch.median"], 1e-5, at_most=True),
        Check("mismatch, mean", after["kl.mismatch.mean"], 1e-3, at_most=True),
        Check("mismatch, share above 1e-3", after["kl.mismatch.share_over_1e-3"], 0.02, at_most=True),
        Check("drift with learning rate 0", drift, 0.05, at_most=True),
        Check("seconds", seconds, 720, at_most=True),
    ]


def _run(root: Path, name: str, overrides: list[str]) -> tuple[Row, Row, float]:
    """Runs one training and returns its evaluation before and after reinforcement, and its seconds."""
    seconds = train(root, name, overrides)
    rows = evaluations(root / name, "calc")
    return rows[0], rows[max(rows)], seconds


def _errors(run: Path) -> float:
    return sum(row["metrics"]["rollout/all/error"] for row in metrics(run, "rollout"))


if __name__ == "__main__":
    sys.exit(main())
