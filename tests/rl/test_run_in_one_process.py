"""A whole run on plain objects: learner, generator and controller in this process, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.driver import drive
from rl.launch.compose import load_config
from rl.launch.run import RunState, open_run
from rl.recipe import Outcome
from rl.watch.watch import open_watch

pytestmark = pytest.mark.timeout(240)
SMALL = [
    "experiment=calc",
    "sft.steps=4",
    "sft.batch_size=8",
    "trainer.steps=3",
    "rollout.groups_per_step=2",
    "rollout.max_in_flight=8",
    "algorithm.group_size=4",
    "eval.tasks=4",
    "eval.samples=2",
    "checkpoint.every=1",
    "checkpoint.sft_every=2",
    "launcher.sft_threads=1",
    "logger.wandb=disabled",
    "logger.console=plain",
    "sandbox.backend=bubblewrap",
    "run.name=plain",
]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TEMPERING_HOME", str(tmp_path / "home"))
    yield


def train(root: Path, *overrides: str) -> Outcome:
    config = load_config([*SMALL, f"run.root={root}", *overrides])
    folder = open_run(config)
    with open_watch(folder, config) as watch:
        outcome = asyncio.run(drive(config, folder, watch, ray_actors=False))
    folder.close(RunState.FINISHED)
    return outcome


def groups_by_step(run: Path) -> dict[int, set[int]]:
    """The groups that each optimiser step trained on."""
    return {
        int(file.stem.removeprefix("step-")): {
            json.loads(line)["trajectory"]["key"][3] for line in file.read_text().splitlines()
        }
        for file in run.glob("rollouts/step-*.jsonl")
    }


def metrics(run: Path, name: str) -> list[float]:
    rows = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def test_a_run_goes_on_where_it_ended_and_never_trains_a_group_twice(tmp_path: Path) -> None:
    first = train(tmp_path)
    assert first.steps == 3
    assert first.before["sampled"].n == first.after["sampled"].n == 8
    second = train(tmp_path, "resume=true", "trainer.steps=5")
    assert second.steps == 5
    assert second.before == first.before
    steps = groups_by_step(tmp_path / "plain")
    assert sorted(steps) == [1, 2, 3, 4, 5]
    trained = [group for groups in steps.values() for group in groups]
    assert len(trained) == len(set(trained)) == 10


@pytest.mark.slow
def test_without_staleness_every_token_is_sampled_by_the_weights_that_train_on_it(tmp_path: Path) -> None:
    train(tmp_path, "rollout=sync")
    assert not any(metrics(tmp_path / "plain", "train/staleness.max"))
    assert metrics(tmp_path / "plain", "rollout/all/masked") == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_sampler_and_trainer_agree_on_the_final_weights(tmp_path: Path) -> None:
    train(tmp_path)
    assert max(metrics(tmp_path / "plain", "eval/calc/kl.mismatch.median")) <= 1e-5
    assert max(metrics(tmp_path / "plain", "eval/calc/kl.mismatch.share_over_1e-3")) <= 0.02


@pytest.mark.slow
def test_truncated_sampling_is_trained_on_what_it_was_drawn_from(tmp_path: Path) -> None:
    train(tmp_path, "engine.top_p=0.9", "engine.top_k=12", "rollout=sync")
    assert max(metrics(tmp_path / "plain", "eval/calc/kl.mismatch.median")) <= 1e-5


@pytest.mark.slow
def test_one_process_trains_and_generates_in_turns_on_the_same_weights(tmp_path: Path) -> None:
    assert train(tmp_path, "launcher.placement=colocated").steps == 3
    run = tmp_path / "plain"
    assert sorted(groups_by_step(run)) == [1, 2, 3]
    assert max(metrics(run, "eval/calc/kl.mismatch.median")) <= 1e-5
    assert metrics(run, "sys/weights.bytes") == [0.0] * 3
    assert train(tmp_path, "launcher.placement=colocated", "resume=true", "trainer.steps=4").steps == 4
