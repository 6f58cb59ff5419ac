"""A whole run on a mixture of environments with a curriculum and a filter, interrupted and resumed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from rl.driver import drive
from rl.launch.compose import load_config
from rl.launch.run import RunState, open_run
from rl.watch.watch import open_watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SETTINGS = [
    "env=mixture",
    "env.mixture.probe=1",
    "env.mixture.letters={share: 2, name: sort, max_in_flight: 8}",
    "env.latency={mean_s: 0.01}",
    "rollout.curriculum={function: frontier, tasks: 6}",
    "rollout.filter={attempts: 1, oversample: 1.5}",
    "rollout.hold_back_steps=1",
    "rollout.groups_per_step=3",
    "rollout.max_in_flight=16",
    "algorithm.group_size=4",
    "sft.steps=2",
    "sft.batch_size=8",
    "eval.tasks=6",
    "eval.samples=1",
    "checkpoint.every=1",
    "launcher.sft_threads=1",
    "logger.wandb=disabled",
    "logger.console=plain",
    "run.name=mixed",
]


def train(root: Path, *overrides: str) -> int:
    config = load_config([*SETTINGS, f"run.root={root}", *overrides])
    folder = open_run(config)
    with open_watch(folder, config) as watch:
        outcome = asyncio.run(drive(config, folder, watch, ray_actors=False))
    folder.close(RunState.FINISHED)
    return outcome.steps


def test_a_mixture_trains_by_its_shares_from_a_curriculum_and_goes_on_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPERING_HOME", str(tmp_path / "home"))
    assert train(tmp_path, "trainer.steps=2") == 2
    assert train(tmp_path, "trainer.steps=4", "resume=true") == 4
    trained: Counter[int] = Counter()
    tasks: dict[int, set[str]] = {}
    for file in (tmp_path / "mixed").glob("rollouts/step-*.jsonl"):
        for line in file.read_text().splitlines():
            key = json.loads(line)["trajectory"]["key"]
            trained[key[3], key[4]] += 1
            tasks.setdefault(key[3], set()).add(key[0])
    assert len(trained) == sum(trained.values()) == 4 * 3 * 4
    assert all(len(names) == 1 for names in tasks.values())
    assert all(name.startswith("probe") == (group % 3 == 1) for group, (name,) in tasks.items())
    assert len({name for names in tasks.values() for name in names}) <= 12
    rows = [json.loads(row) for row in (tmp_path / "mixed" / "metrics.jsonl").read_text().splitlines()]
    measured = {name.split("/")[1] for row in rows if row["family"] == "eval" for name in row["metrics"]}
    assert measured == {"letters+probe", "letters", "probe"}
