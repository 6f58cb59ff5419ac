"""Asynchronous against synchronous training on `experiment=calc` with slow tools.

`python -m benchmarks.async_calc [--steps N] [OVERRIDES]`. Tools wait an exponential 0.2 s, one call in fifty
5 s (`env.latency`). One warm start is shared; from it the same number of optimiser steps is taken twice, with
`rollout=sync` and with `rollout=async`, everything else equal. Time counts from the evaluation before the
first step to the end of the last step. The k-th call of a task waits the same time in both runs. Prints idle
shares (`sys/idle.*`) and ends with the line `async X times as fast as sync`; exits 1 below 1.3, or when a
run's samples failed or were too old.

The machine must be otherwise idle: sampling and training compete for its cores with whatever else runs, and
that slows both runs, but not the waits that asynchronous training hides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

TARGET = 1.3
STALENESS = 4
LATENCY = "env.latency={mean_s: 0.2, slow_share: 0.02, slow_s: 5.0}"
_QUIET = ("logger.wandb=disabled", "logger.console=plain", "eval.tasks=50", "eval.samples=1")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run between its first evaluation and its last optimiser step: seconds, and means over the steps."""

    seconds: float
    steps: int
    metrics: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the warm start and both ways to train; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_calc", description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-start", type=int, default=250, help="steps of SFT before")
    parser.add_argument("overrides", nargs="*", help="further overrides of both runs")
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.warm_start < 1:
        parser.error("--steps must be at least 2 and --warm-start at least 1")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        policy = _warm_start(root, options.warm_start)
        common = [f"model.path={policy}", "sft.steps=0", LATENCY, f"trainer.steps={options.steps}"]
        common += options.overrides
        sync = _measure(root, "sync", ["rollout=sync", *common])
        ours = _measure(root, "async", ["rollout=async", f"rollout.staleness={STALENESS}", *common])
    return report(sync, ours)


def report(sync: Measured, ours: Measured) -> int:
    """Prints both runs and the ratio; returns the exit status."""
    names = ("idle.trainer", "idle.rollout", "step_s", "train_s")
    print(f"{'run':<8}{'steps':>6}{'seconds':>9}" + "".join(f"{name:>14}" for name in names))
    for name, run in (("sync", sync), ("async", ours)):
        cells = "".join(f"{run[f'sys/{key}']:>14.3f}" for key in names)
        print(f"{name:<8}{run.steps:>6}{run.seconds:>9.1f}{cells}")
    tool_use = ours["rollout/all/tool_use"]
    print(f"tool use {tool_use:.2f}; oldest trained token {ours['staleness']:.0f} steps (bound {STALENESS})")
    ratio = sync.seconds / ours.seconds
    missed = [
        text
        for missed, text in (
            (ratio < TARGET, f"{ratio:.2f} times as fast, target {TARGET}"),
            (sync["errors"] + ours["errors"] > 0, "samples failed"),
            (ours["staleness"] > STALENESS, "a token was older than the bound"),
            (sync["staleness"] > 0, "synchronous training saw an older token"),
            (sync.steps != ours.steps, f"{sync.steps} steps against {ours.steps}"),
        )
        if missed
    ]
    for text in missed:
        print(f"MISSED: {text}")
    print(f"async {ratio:.2f} times as fast as sync")
    return 1 if missed else 0


def _warm_start(root: Path, steps: int) -> Path:
    _train(root, "warm", [f"sft.steps={steps}", "trainer.steps=0", "eval.tasks=10"])
    return root / "warm" / "checkpoints" / f"step-{steps}" / "policy"


def _measure(root: Path, name: str, overrides: list[str]) -> Measured:
    _train(root, name, overrides)
    return measured([json.loads(row) for row in (root / name / "metrics.jsonl").read_text().splitlines()])


def measured(rows: Sequence[Mapping[str, Any]]) -> Measured:
    """Reads a run's metrics.jsonl."""
    began = max(row["time"] for row in rows if row["family"] == "eval" and row["step"] == 0)
    steps = [row for row in rows if row["family"] == "sys"]
    ended = max(row["time"] for row in steps)
    metrics = {
        name: fmean(row["metrics"][name] for row in rows if name in row["metrics"])
        for name in ("sys/idle.trainer", "sys/idle.rollout", "sys/step_s", "rollout/all/tool_use")
    }
    metrics["sys/train_s"] = (1 - metrics["sys/idle.trainer"]) * metrics["sys/step_s"]
    metrics["errors"] = sum(row["metrics"].get("rollout/all/error", 0.0) for row in rows)
    metrics["staleness"] = max(row["metrics"].get("train/staleness.max", 0.0) for row in rows)
    return Measured(ended - began, max(row["step"] for row in steps), metrics)


def _train(root: Path, name: str, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "rl.launch.cli", "train", "experiment=calc", f"run.root={root}"]
    subprocess.run(
        [*command, f"run.name={name}", *_QUIET, *overrides],
        check=True,
        env={**os.environ, "TEMPERING_HOME": str(root / "home")},
    )


if __name__ == "__main__":
    sys.exit(main())
