"""A distillation from its first group to its last, in this process, with two small teachers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from envs.types import Group
from model.chat import nano_chat
from model.checkpoint import save_policy
from model.config import PolicyConfig
from model.policy import Policy
from rl.distil.mix import MixError
from rl.distil.stage import first_mix, resolved
from rl.driver import drive
from rl.launch.compose import load_config
from rl.launch.config import RunConfig
from rl.launch.run import RunState, open_run
from rl.recipe import Outcome
from rl.trainers.distiller import Distiller, Lesson
from rl.trainers.opd import OPDConfig
from rl.trainers.optim import OptimizerConfig
from rl.watch.watch import open_watch

pytestmark = pytest.mark.timeout(300)
SMALL = [
    "env=mixture",
    "env.mixture={sort: 0.75, recall: 0.25}",
    "model=pico",
    "trainer.steps=0",
    "eval.tasks=4",
    "eval.samples=1",
    "algorithm.group_size=2",
    "rollout.groups_per_step=4",
    "rollout.max_in_flight=16",
    "rollout.staleness=0",
    "engine.max_completion_tokens=6",
    "checkpoint.every=1",
    "logger.wandb=disabled",
    "logger.console=plain",
    "run.name=student",
]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TEMPERING_HOME", str(tmp_path / "home"))
    yield


def teacher(folder: Path, preset: str, seed: int) -> Path:
    policy = Policy(PolicyConfig.preset(preset))
    policy.reset_parameters(seed)
    save_policy(policy, folder, chat=nano_chat())
    return folder


def configured(root: Path, *overrides: str) -> RunConfig:
    wide, narrow = root / "wide", root / "narrow"
    if not wide.exists():
        teacher(wide, "nano", 5)
        teacher(narrow, "pico", 6)
    teachers = f"opd.teachers={{wide: {{path: {wide}, envs: [sort]}}, narrow: {{path: {narrow}}}}}"
    return load_config([*SMALL, teachers, f"run.root={root}", *overrides])


def run(config: RunConfig) -> Outcome:
    folder = open_run(config)
    with open_watch(folder, config) as watch:
        outcome = asyncio.run(drive(config, folder, watch, ray_actors=False))
    folder.close(RunState.FINISHED)
    return outcome


def series(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.slow
def test_the_student_comes_closer_to_teachers_of_other_widths_and_goes_on_after_a_stop(
    tmp_path: Path,
) -> None:
    config = configured(
        tmp_path, "opd.steps=6", "opd.optimizer.learning_rate=3e-3", "opd.optimizer.warmup_steps=1"
    )
    assert run(config).steps == 6
    kl = series(tmp_path / "student", "opd/kl")
    assert len(kl) == 6
    assert sum(kl[-2:]) < 0.9 * sum(kl[:2])
    assert set(series(tmp_path / "student", "opd/config.max")) == {1.0}
    file = tmp_path / "student" / "distillation.yaml"
    mix = yaml.safe_load(file.read_text())
    mix["shares"] = {"recall": 0.5, "sort": 0.5}
    del mix["teachers"]["wide"]
    file.write_text(yaml.safe_dump(mix))
    assert run(configured(tmp_path, "opd.steps=8", "run.resume=true")).steps == 8
    assert series(tmp_path / "student", "opd/config.max")[6:] == [2.0, 2.0]
    assert series(tmp_path / "student", "opd/kl.wide") == pytest.approx(
        series(tmp_path / "student", "opd/kl.wide")[:6]
    )
    notes = (tmp_path / "student" / "logs" / "watch.log").read_text()
    assert "version 2 of distillation.yaml is in force from group 24 on: teachers narrow" in notes


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path)
    text = (tmp_path / "narrow" / "tokenizer.json").read_text()
    (tmp_path / "narrow" / "tokenizer.json").write_text(text.replace('"z"', '"Z"'))
    with pytest.raises(MixError, match=r"teacher narrow .* has another tokenizer than the student"):
        resolved(first_mix(config), config)


def test_a_teacher_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = configured(tmp_path, "opd.teachers={all: {path: nowhere}}")
    with pytest.raises(MixError, match="teacher all: there is no run 'nowhere'"):
        resolved(first_mix(config), config)


def test_a_run_distils_or_reinforces(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a run distils or reinforces; set trainer\.steps=0"):
        configured(tmp_path, "trainer.steps=5")
    with pytest.raises(ValueError, match=r"set opd\.temperature=0\.5"):
        configured(tmp_path, "engine.temperature=0.5")


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.optimizer.learning_rate=0.1",
        "trainer.token_budget=99",
        "algorithm.entropy_coef=0.1",
        "algorithm=gspo",
        "effort=priced",
    ],
)
def test_what_only_rewards_would_use_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ValueError, match=r"(trainer|algorithm|effort)\.\w+.*: no effect with opd\.teachers"):
        configured(tmp_path, setting)


def test_a_distillation_needs_no_group() -> None:
    assert load_config(["experiment=opd_calc"]).algorithm.group_size == 1


def test_what_only_a_distillation_would_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"opd\.steps, opd\.objective: no effect without opd\.teachers"):
        load_config(["experiment=sort", "opd.steps=9", "opd.objective=sampled"])


def test_hidden_states_in_files_teach_the_same(tmp_path: Path, trajectories: list[Group]) -> None:
    folder = teacher(tmp_path / "teacher", "nano", 5)
    metrics = []
    for store in ("memory", "disk"):
        policy = Policy(PolicyConfig.preset("pico"))
        policy.reset_parameters(0)
        config = OPDConfig(store=store, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0))
        student = Distiller(policy, config, tmp_path / "hidden")
        student.use({"all": str(folder)}, {})
        lessons = [Lesson("all", number) for number in range(len(trajectories))]
        metrics.append([student.step(trajectories, lessons, 0) for _ in range(2)])
    assert metrics[0] == metrics[1]
    assert (metrics[0][0]["opd/config.min"], metrics[0][0]["opd/config.max"]) == (0.0, len(trajectories) - 1)
    assert not [path for path in (tmp_path / "hidden").rglob("*") if path.is_file()]
