from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rl.watch import rollouts
from rl.watch.jsonl import JsonlLog, read_rows, row, series
from rl.watch.rollouts import RolloutLog


def test_rows_come_back_as_written_also_what_is_not_finite(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with JsonlLog(path) as log:
        log.write(row("train", 1, {"train/loss": 0.1 + 0.2, "train/a": math.inf, "train/b": math.nan}))
    (entry,) = read_rows(path)
    assert (entry.family, entry.step, entry.metrics["train/loss"]) == ("train", 1, 0.1 + 0.2)
    assert entry.metrics["train/a"] == math.inf
    assert math.isnan(entry.metrics["train/b"])


def test_a_row_torn_by_a_kill_is_cut_off_and_the_file_goes_on(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with JsonlLog(path) as log:
        log.write(row("train", 1, {"train/loss": 1.0}))
    with path.open("a") as file:
        file.write('{"family": "train", "step": 2, "met')
    assert [entry.step for entry in read_rows(path)] == [1]
    with JsonlLog(path) as log:
        log.write(row("train", 2, {"train/loss": 2.0}))
    assert series(read_rows(path), "train/loss") == ([1, 2], [1.0, 2.0])


@pytest.mark.parametrize("tail", [b"\0" * 70, b'{"fam' + b"\0" * 9, b'\0\0\n{"family": 1}\n', b"\n\0"])
def test_what_a_loss_of_power_left_is_cut_off_and_the_file_goes_on(tmp_path: Path, tail: bytes):
    path = tmp_path / "metrics.jsonl"
    with JsonlLog(path) as log:
        log.write(row("train", 1, {"train/loss": 1.0}))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + tail if tail.startswith(b"\n") else whole + tail)
    assert [entry.step for entry in read_rows(path)] == [1]
    with JsonlLog(path) as log:
        log.write(row("train", 2, {"train/loss": 2.0}))
    assert series(read_rows(path), "train/loss") == ([1, 2], [1.0, 2.0])


def test_the_lists_of_groups_and_failures_go_on_behind_their_last_whole_line(tmp_path: Path):
    log = RolloutLog(tmp_path)
    log.dispatched(0, "a", 50)
    for name in ("dispatched.jsonl", "failed.jsonl"):
        with (tmp_path / "rollouts" / name).open("ab") as file:
            file.write(b'{"gro' + b"\0" * 20)
    log = RolloutLog(tmp_path)
    log.dispatched(1, "b", 50)
    lines = (tmp_path / "rollouts" / "dispatched.jsonl").read_text().splitlines()
    assert [json.loads(line)["group"] for line in lines] == [0, 1]
    assert rollouts.read(tmp_path, failed=True) == []


def test_a_repeated_step_counts_once_and_late_rows_stay(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with JsonlLog(path) as log:
        for step, value in ((3, 1.0), (8, 2.0), (2, 3.0), (3, 4.0)):
            log.write(row("train", step, {"train/loss": value}))
    assert series(read_rows(path), "train/loss") == ([2, 3, 8], [3.0, 4.0, 2.0])


def test_no_file_no_rows(tmp_path: Path):
    assert read_rows(tmp_path / "none.jsonl") == []
