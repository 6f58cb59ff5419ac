"""Runs `temper` for benchmarks of learning, and reads what its runs and evaluations say.

With `--runs FOLDER` a benchmark keeps its runs there: what has finished is not run again, and what was
interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_TEMPER = [sys.executable, "-m", "rl.launch.cli"]
_SECONDS = "seconds.txt"


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


def options(module: str, explanation: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks of learning have."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=explanation)
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder, and go on with those there")
    parser.add_argument("overrides", nargs="*", help="further overrides, such as trainer.steps=100")
    return parser


@contextmanager
def runs_folder(chosen: Path | None) -> Iterator[Path]:
    """The folder of a benchmark's runs: the chosen one, or one that is gone afterwards."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def train(root: Path, name: str, overrides: Sequence[str]) -> float:
    """Runs one training in `root` under a name, or what is left of it; returns its seconds so far."""
    run = root / name
    state = _state(run)
    if state != "finished":
        going_on = [] if state is None else ["run.resume=true"]
        print(f"{'begin' if state is None else 'go on with'} {name}: {' '.join(overrides)}", flush=True)
        place = [f"run.root={root}", f"run.name={name}", "logger.wandb=disabled"]
        _timed([*_TEMPER, "train", *place, *overrides, *going_on], run)
    return _seconds(run)


def evaluate(root: Path, target: str, out: Path, settings: Sequence[str]) -> dict[str, Row]:
    """Runs one evaluation, or what is left of it, and returns its cells by environment."""
    if not (out / "result.json").exists():
        words = [target, *settings, f"out={out}"] if not (out / "plan.json").exists() else [str(out)]
        print(f"evaluate {target}", flush=True)
        subprocess.run([*_TEMPER, "eval", *words, "--root", str(root), "--console", "plain"], check=True)
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


def on_seeds(
    module: str, explanation: str | None, run: Callable[[int, Path, list[str]], Sequence[Check]]
) -> tuple[list[Check], int]:
    """Calls `run` with each seed, the folder of runs and further overrides; prints each seed's figures.

    Returns:
        All figures, and the number of seeds.
    """
    parser = options(module, explanation)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    checks: list[Check] = []
    with runs_folder(arguments.runs) as root:
        for seed in arguments.seeds:
            found = run(seed, root, arguments.overrides)
            print(f"seed {seed}:")
            for check in found:
                print(f"  {check}", flush=True)
            checks += found
    return checks, len(arguments.seeds)


def _state(run: Path) -> str | None:
    """How far a run got; None: it was never begun."""
    record = run / "driver.json"
    return json.loads(record.read_text())["state"] if record.exists() else None


def _timed(command: Sequence[str], run: Path) -> None:
    started = time.monotonic()
    try:
        subprocess.run(command, check=True)
    finally:
        if run.exists():
            (run / _SECONDS).write_text(str(_seconds(run) + time.monotonic() - started))


def _seconds(run: Path) -> float:
    record = run / _SECONDS
    return float(record.read_text()) if record.exists() else 0.0
