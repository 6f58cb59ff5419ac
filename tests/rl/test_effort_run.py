"""The experiment `effort` end to end on plain objects: a run leaves its cost-quality curve."""

import asyncio
import json
from pathlib import Path

import pytest

from rl import effort_curve
from rl.driver import drive
from rl.launch.compose import load_config
from rl.launch.run import RunState, open_run
from rl.watch.watch import open_watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SMALL = [
    "experiment=effort",
    "sft.steps=3",
    "sft.batch_size=8",
    "trainer.steps=2",
    "algorithm.group_size=2",
    "rollout.groups_per_step=3",
    "rollout.max_in_flight=6",
    "eval.tasks=3",
    "eval.samples=1",
    "eval.efforts=[1,60,100]",
    "eval.effort_tasks=4",
    "logger.wandb=offline",
    "logger.console=plain",
    "launcher.sft_threads=1",
    "run.name=dial",
]


def test_a_run_leaves_its_curve_in_files_metrics_and_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPERING_HOME", str(tmp_path / "home"))
    config = load_config([*SMALL, f"run.root={tmp_path}"])
    folder = open_run(config)
    with open_watch(folder, config) as watch:
        asyncio.run(drive(config, folder, watch, ray_actors=False))
    folder.close(RunState.FINISHED)
    run = tmp_path / "dial"
    points = effort_curve.read(run)
    assert [(p.effort, p.n) for p in points] == [(1, 4), (60, 4), (100, 4)]
    assert (run / effort_curve.PICTURE).stat().st_size > 1000
    rows = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "eval/probe/greedy/effort.60/n" in row]
    assert row["eval/probe/greedy/effort.60/n"] == 4
    assert row["eval/probe/greedy/effort.60/len.sampled.mean"] == points[1].tokens
    text = (run / "logs" / "watch.log").read_text()
    assert "effort    score" in text and "W&B: logging a curve failed" not in text
    assert list(run.glob("wandb/**/*.table.json"))
