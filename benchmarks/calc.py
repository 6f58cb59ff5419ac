"""The main job on several seeds, against what it has to show: `python -m benchmarks.calc [--seeds 0 1]`.

Each seed runs `temper train experiment=calc` and the same with learning rate 0, whose samples are drawn with
the same seeds and must score as after the warm start. Exits 1 when a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """One figure and its bound."""

    name: str
    value: float
    bound: float
    at_most: bool

    @property
    def held(self) -> bool:
        """Whether the figure keeps its bound; a figure that is not a number does not."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{'ok  ' if self.held else 'MISS'} {self.name}: {self.value:.4g} {sign} {self.bound:g}"


def main() -> int:
    """Runs all seeds and prints each figure; the last line counts those that held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calc", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("overrides", nargs="*", help="further overrides, such as trainer.steps=100")
    arguments = parser.parse_args()
    checks: list[Check] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            checks += _seed(seed, Path(folder), arguments.overrides)
    held = sum(check.held for check in checks)
    print(f"calc: {held}/{len(checks)} figures hold on {len(arguments.seeds)} seeds")
    return 0 if held == len(checks) else 1


def _seed(seed: int, root: Path, overrides: list[str]) -> list[Check]:
    before, after, seconds = _run(root, f"calc-{seed}", [f"run.seed={seed}", *overrides])
    still = ["trainer.optimizer.learning_rate=0", "trainer.steps=5"]
    control_before, control, _ = _run(root, f"still-{seed}", [f"run.seed={seed}", *overrides, *still])
    drift = abs(control["sampled/score.mean"] - control_before["sampled/score.mean"])
    checks = [
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
    print(f"seed {seed}:")
    for check in checks:
        print(f"  {check}", flush=True)
    return checks


def _run(root: Path, name: str, overrides: list[str]) -> tuple[Row, Row, float]:
    """Runs one training and returns its evaluation before and after reinforcement, and its seconds."""
    command = [sys.executable, "-m", "rl.launch.cli", "train", "experiment=calc"]
    started = time.monotonic()
    subprocess.run(
        [*command, f"run.root={root}", f"run.name={name}", "logger.wandb=disabled", *overrides], check=True
    )
    seconds = time.monotonic() - started
    evaluations: dict[int, Row] = {}
    for row in _rows(root / name, "eval"):
        found = {key.removeprefix("eval/calc/"): value for key, value in row["metrics"].items()}
        evaluations.setdefault(row["step"], {}).update(found)
    return evaluations[0], evaluations[max(evaluations)], seconds


def _errors(run: Path) -> float:
    return sum(row["metrics"]["rollout/all/error"] for row in _rows(run, "rollout"))


def _rows(run: Path, family: str) -> list[Row]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["family"] == family]


if __name__ == "__main__":
    sys.exit(main())
