"""The effort dial, trained and measured: `python -m benchmarks.effort [--tasks 2000] [--control-steps 60]`.

Runs `temper train experiment=effort`, measures the cost-quality curve of its policy on so many paired tasks
an effort, and trains the control, whose prompt does not tell the effort. Draws both curves against the best
possible policy (`--picture`). Exits 1 when a figure is missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from envs.probe import Optimum, optimum
from rewards.length import LengthPenaltyConfig
from rl import effort_curve
from rl.effort_curve import CurvePoint
from rl.launch.compose import load_config

GRID = (1, 10, 25, 37, 50, 60, 75, 90, 100)
ORDERED = (1, 50, 100)
JUDGED = (1, 25, 50, 75, 100)
QUESTION_TOKENS, ANSWER_TOKENS = 3, 3
SLACK_QUESTIONS = 0.5


@dataclass(frozen=True, slots=True)
class Check:
    """One figure and whether it is what it must be."""

    name: str
    value: str
    held: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.held else 'MISS'} {self.name}: {self.value}"


def main() -> int:
    """Trains, measures, prints every figure; the last line counts those that held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.effort", description=__doc__)
    parser.add_argument("--tasks", type=int, default=2000, help="tasks an effort of the curve")
    parser.add_argument("--control-steps", type=int, default=60, help="optimiser steps of the control")
    parser.add_argument("--picture", type=Path, default=Path("benchmarks/results/effort.png"))
    parser.add_argument("overrides", nargs="*", help="further overrides, such as run.seed=1")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        seconds = _train(root, "effort", arguments.overrides)
        grid = f"eval.efforts=[{','.join(map(str, GRID))}]"
        fine = ["resume=true", grid, f"eval.effort_tasks={arguments.tasks}"]
        _train(root, "effort", [*arguments.overrides, *fine])
        hidden = ["effort.in_prompt=false", f"trainer.steps={arguments.control_steps}", grid]
        _train(root, "hidden", [*arguments.overrides, *hidden])
        points, control = effort_curve.read(root / "effort"), effort_curve.read(root / "hidden")
    best = optima(points)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    bound = [(best[p.effort].tokens, best[p.effort].accuracy) for p in points]
    curves = {"effort in the prompt": points, "effort hidden (control)": control}
    effort_curve.draw(curves, arguments.picture, bound=bound)
    print(f"effort in the prompt:\n{effort_curve.table(points)}")
    print(f"effort hidden:\n{effort_curve.table(control)}\npicture: {arguments.picture}")
    checks = [*figures(points, best), *control_figures(control)]
    checks += [Check("seconds of training", f"{seconds:.0f} <= 900", seconds <= 900)]
    for check in checks:
        print(f"  {check}", flush=True)
    held = sum(check.held for check in checks)
    print(f"effort: {held}/{len(checks)} figures hold")
    return 0 if held == len(checks) else 1


def optima(points: Sequence[CurvePoint]) -> dict[int, Optimum]:
    """Returns what the best policy reaches at each effort, by dynamic programming."""
    penalty = _penalty()
    return {
        p.effort: optimum(
            lambda tokens, effort=p.effort: penalty.penalty(effort, tokens),
            question_tokens=QUESTION_TOKENS,
            answer_tokens=ANSWER_TOKENS,
        )
        for p in points
    }


def figures(points: Sequence[CurvePoint], best: dict[int, Optimum]) -> list[Check]:
    """Returns the checks of a curve whose policy is told the effort."""
    at = {p.effort: p for p in points}
    low, middle, high = (at[b] for b in ORDERED)
    levels = [p for p in points if p.effort in _levels()]
    regret = sum(best[b].reward - at[b].reward for b in JUDGED) / len(JUDGED)
    gain = high.score - low.score
    lengths = " < ".join(f"{at[b].tokens:.2f}" for b in ORDERED)
    checks = [
        Check("greedy tokens at 1, 50, 100", lengths, low.tokens < middle.tokens < high.tokens),
        Check(
            "tokens(100) / tokens(1)", f"{high.tokens / low.tokens:.2f} >= 2", high.tokens >= 2 * low.tokens
        ),
        Check("accuracy(100) - accuracy(1)", f"{gain:.3f} >= 0.08", gain >= 0.08),
        Check("mean regret to the optimum", f"{regret:.3f} <= 0.08", regret <= 0.08),
        Check(
            "samples without a score",
            str(sum(p.n - p.n_valid for p in points)),
            all(p.n == p.n_valid for p in points),
        ),
    ]
    return checks + [_between(p, levels) for p in points if p.effort not in _levels()]


def _between(point: CurvePoint, levels: Sequence[CurvePoint]) -> Check:
    """An effort that was never trained at asks as much as its neighbours, or in between."""
    below = max((p for p in levels if p.effort < point.effort), key=lambda p: p.effort)
    above = min((p for p in levels if p.effort > point.effort), key=lambda p: p.effort)
    least, most = sorted((below.calls, above.calls))
    held = least - SLACK_QUESTIONS <= point.calls <= most + SLACK_QUESTIONS
    text = f"{point.calls:.2f} in {least:.2f}..{most:.2f} +- {SLACK_QUESTIONS}"
    return Check(f"questions at {point.effort}, never trained at", text, held)


def control_figures(points: Sequence[CurvePoint]) -> list[Check]:
    """Returns the check of a curve whose policy is not told the effort.

    What is batched together changes the last bits of a sum, so that greedy lengths differ a little.
    """
    lengths = [p.tokens for p in points if p.effort in ORDERED]
    apart = lengths[-1] - lengths[0] > SLACK_QUESTIONS * QUESTION_TOKENS
    ordered = apart and all(a < b for a, b in pairwise(lengths))
    text = ", ".join(f"{length:.2f}" for length in lengths)
    return [Check("hidden effort: tokens at 1, 50, 100 are not ordered", text, not ordered)]


def _penalty() -> LengthPenaltyConfig:
    penalty = load_config(["experiment=effort"]).effort.length_penalty
    assert penalty is not None
    return penalty


def _levels() -> tuple[int, ...]:
    return load_config(["experiment=effort"]).effort.levels


def _train(root: Path, name: str, overrides: Sequence[str]) -> float:
    """Runs `temper train experiment=effort` and returns its seconds."""
    command = [sys.executable, "-m", "rl.launch.cli", "train", "experiment=effort"]
    fixed = [f"run.root={root}", f"run.name={name}", "logger.wandb=disabled"]
    started = time.monotonic()
    subprocess.run([*command, *fixed, *overrides], check=True)
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
