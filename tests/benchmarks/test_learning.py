"""The figures of the learning benchmarks, and that they go on with what is there."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import opd, sort
from benchmarks.learning import Check, evaluate, evaluations, metrics, on_seeds, runs_folder, train

FALLING = [0.4, 0.3, 0.2, 0.3, 0.1, 0.1, 0.05, 0.06]
STEPS = {"calc": 160.0, "sort": 80.0, opd.STUDENT: 78.0}


def row(mean: float, n: int = 100, n_valid: int = 100) -> dict:
    return {"avg": {"mean": mean}, "n": n, "n_valid": n_valid, "cell": {"env": "calc"}}


def missed(pupil=(0.95, 0.88), steps=STEPS, kl=FALLING, lost: int = 0) -> list[str]:
    students = {"calc": row(pupil[0], n_valid=100 - lost), "sort": row(pupil[1])}
    checks = opd.figures(students, {"calc": row(0.97), "sort": row(0.92)}, steps, kl)
    return [check.name for check in checks if not check.held]


def test_a_student_that_keeps_up_with_both_teachers_misses_nothing() -> None:
    assert missed() == []


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"pupil": (0.95, 0.86)}, "share of the sort teacher's accuracy"),
        ({"pupil": (0.919, 0.9)}, "share of the calc teacher's accuracy"),
        ({"steps": STEPS | {opd.STUDENT: 80.0}}, "steps, against the shorter RL"),
        ({"kl": [*FALLING[:-2], 0.14, 0.15]}, "largest rise of the smoothed KL, in standard errors"),
        ({"kl": [0.4] * 8}, "smoothed KL, the last part against the first"),
        ({"lost": 1}, "samples without a score"),
    ],
)
def test_each_figure_that_is_missed_is_named(changed: dict, name: str) -> None:
    assert missed(**changed) == [name]


def test_the_smoothed_kl_uses_every_step_whatever_their_number() -> None:
    assert opd.rise([*range(9, 0, -1)]) < 0 < opd.rise([*range(9, 1, -1), 19])
    assert opd.kept([4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 2.0, 3.0]) == pytest.approx(0.5)


def test_a_floor_with_noise_is_no_rise_of_the_kl_and_one_above_its_noise_is() -> None:
    noise = np.random.default_rng(0).exponential(0.02, 78)
    falling = 0.2 * np.exp(-np.arange(78) / 10)
    assert opd.rise((falling + noise).tolist()) < opd.NOISE
    assert opd.rise((falling + noise + 0.05 * (np.arange(78) > 58)).tolist()) > opd.NOISE


def test_a_gain_of_less_than_a_tenth_is_missed() -> None:
    after = {"sampled/n": 9.0, "sampled/n_valid": 9.0, "kl.mismatch.mean": 0.0}
    rows = [{"sampled/score.mean": score} | after for score in (0.7, 0.78, 0.85)]
    names = [[c.name for c in sort.figures(rows[0], row, 1.0) if not c.held] for row in rows[1:]]
    assert names == [["gain of sampled accuracy"], []]


def test_what_is_no_number_holds_no_bound() -> None:
    assert not Check("x", float("nan"), 1.0, at_most=True).held
    assert not Check("x", float("nan"), 1.0, at_most=False).held


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    run = tmp_path / "calc"
    run.mkdir()
    (run / "driver.json").write_text(json.dumps({"state": "finished"}))
    (run / "seconds.txt").write_text("12.5")
    rows = [
        {"family": "eval", "step": 0, "metrics": {"eval/calc/sampled/score.mean": 0.2}},
        {"family": "opd", "step": 1, "metrics": {"opd/kl": 0.1}},
        {"family": "eval", "step": 0, "metrics": {"eval/calc/greedy/score.mean": 0.0}},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(tmp_path, "calc", ["no.such.setting=1"]) == 12.5
    assert evaluations(run, "calc") == {0: {"sampled/score.mean": 0.2, "greedy/score.mean": 0.0}}
    assert [row["step"] for row in metrics(run, "opd")] == [1]


def test_a_finished_evaluation_is_read(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"cells": [row(0.5)]}))
    assert evaluate(tmp_path, "nobody", tmp_path, ["n=1"])["calc"]["avg"]["mean"] == 0.5


def test_runs_stay_where_they_were_asked_to(tmp_path: Path) -> None:
    with runs_folder(tmp_path / "new") as root:
        assert root == (tmp_path / "new").resolve() and root.is_dir()
    with runs_folder(None) as root:
        assert root.is_dir()
    assert not root.exists()


def test_every_seed_is_run_in_the_folder_with_the_overrides_and_told(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    def run(seed: int, root: Path, overrides: list[str]) -> list[Check]:
        (root / f"run-{seed}").write_text(" ".join(overrides))
        return [Check("score", seed / 10, 0.35, at_most=True)]

    words = ["sort", "trainer.steps=1", "sft.steps=2", "--runs", str(tmp_path), "--seeds", "3", "4"]
    monkeypatch.setattr("sys.argv", words)
    checks, seeds = on_seeds("sort", None, run)
    assert [check.held for check in checks] == [True, False] and seeds == 2
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == dict.fromkeys(
        ["run-3", "run-4"], "trainer.steps=1 sft.steps=2"
    )
    assert capsys.readouterr().out.splitlines() == [
        "seed 3:", "  ok   score: 0.3 <= 0.35", "seed 4:", "  MISS score: 0.4 <= 0.35"
    ]  # fmt: skip
