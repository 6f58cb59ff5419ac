"""Runs `temper` for benchmarks of learning, and reads what its runs and evaluations say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.calc import Row

_TEMPER = [sys.executable, "-m", "rl.launch.cli"]


def train(root: Path, name: str, overrides: Sequence[str]) -> float:
    """Runs one training in `root` under a name and returns its seconds."""
    started = time.monotonic()
    place = [f"run.root={root}", f"run.name={name}", "logger.wandb=disabled"]
    subprocess.run([*_TEMPER, "train", *place, *overrides], check=True)
    return time.monotonic() - started


def evaluate(root: Path, target: str, out: Path, settings: Sequence[str]) -> dict[str, Row]:
    """Runs one evaluation and returns its cells by environment."""
    words = [target, "--root", str(root), "--console", "plain", f"out={out}", *settings]
    subprocess.run([*_TEMPER, "eval", *words], check=True)
    cells = json.loads((out / "result.json").read_text())["cells"]
    return {cell["cell"]["env"]: cell for cell in cells}


def metrics(run: Path, family: str) -> list[Row]:
    """The rows of one family of a run's metrics, each with its step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["family"] == family]


def evaluations(run: Path, env: str) -> dict[int, Row]:
    """The evaluations of a run on one environment, by the version of its weights."""
    found: dict[int, Row] = {}
    for row in metrics(run, "eval"):
        values = {key.removeprefix(f"eval/{env}/"): value for key, value in row["metrics"].items()}
        found.setdefault(row["step"], {}).update(values)
    return found
