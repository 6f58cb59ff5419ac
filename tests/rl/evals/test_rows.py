from __future__ import annotations

import os
from pathlib import Path

import pytest

from envs.types import (
    Boundary,
    FinishReason,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from rl.evals.rows import Cell, DiskError, RowLog, RowsError, read_rows, row_of

CELL = Cell("sort", 50, "chat")


def trajectory(score: Score | Missing, version: int = 7) -> Trajectory:
    turn = Turn(
        (1, 2, 3), (4, 5), (-1.0, -1.0), (version, version), FinishReason.STOP, Message(Role.ASSISTANT, "a")
    )
    key = TrajectoryKey("sort/a", 50, "chat", 3, 1, 2)
    timings = {"total_s": 2.0, "score_s": 0.5, "tool_s": 0.25}
    return Trajectory(key, ((turn,),), Status.FINISHED, StopReason.ANSWER, score, timings=timings)


def test_a_row_tells_what_a_sample_used_and_scored() -> None:
    row = row_of(trajectory(Score(0.25, {"outcome": 1.0, "length": -0.75})), CELL, 7, own_sandbox=False)
    assert (row.score, row.input_tokens, row.output_tokens, row.seconds, row.sandbox_s) == (
        1.0,
        3,
        2,
        2.0,
        0.25,
    )
    assert row.place == (CELL, 3, 1)
    own = row_of(trajectory(Score(1.0)), CELL, 7, own_sandbox=True)
    assert own.sandbox_s == 1.5


def test_a_sample_without_a_verdict_has_no_score() -> None:
    row = row_of(trajectory(Missing("it is gone", Boundary.SANDBOX)), CELL, 7, own_sandbox=False)
    assert row.score is None
    assert row.missing == "sandbox: it is gone"


def test_tokens_of_other_weights_are_refused() -> None:
    with pytest.raises(RowsError, match="versions \\(6,\\), but version 7 is evaluated"):
        row_of(trajectory(Score(1.0), version=6), CELL, 7, own_sandbox=False)


def test_rows_are_read_back_and_a_later_one_replaces_an_earlier(tmp_path: Path, row) -> None:
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.write([row(0, 0, None), row(0, 1, 1.0)], CELL, 0.5)
        log.write([row(0, 0, 0.5, attempt=1)], CELL, 0.25)
    with RowLog(path) as log:
        found = log.found
    assert found.rows == read_rows(path).rows
    assert [(r.sample, r.score) for r in found.of(CELL)] == [(0, 0.5), (1, 1.0)]
    assert found.device_s == {CELL: 0.75}


@pytest.mark.parametrize("tail", [bytes(50), b'\0\0\n{"row": 1}\n'])
def test_what_a_loss_of_power_left_is_removed_and_what_was_written_is_on_disk(
    tmp_path: Path, row, tail: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync, synced = tmp_path / "rows.jsonl", os.fsync, list[int]()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.stat().st_size) or fsync(fd))
    with RowLog(path) as log:
        log.write([row(0, 0, 1.0)], CELL, 0.5)
        assert synced == [path.stat().st_size]
    with path.open("ab") as file:
        file.write(tail)
    assert [r.task for r in read_rows(path).of(CELL)] == [0]
    with RowLog(path) as log:
        log.write([row(1, 0, 0.0)], CELL, 0.5)
    assert [r.score for r in read_rows(path).of(CELL)] == [1.0, 0.0]


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_removed_and_nothing_else(tmp_path: Path, row, cut: int) -> None:
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.write([row(0, 0, 1.0)], CELL, 0.5)
        before = path.read_bytes()
        log.write([row(1, 0, 1.0)], CELL, 0.5)
    path.write_bytes(path.read_bytes()[: len(before) + cut])
    with RowLog(path) as log:
        assert [r.task for r in log.found.of(CELL)] == [0]
        log.write([row(1, 0, 0.0)], CELL, 0.5)
    assert [r.score for r in read_rows(path).of(CELL)] == [1.0, 0.0]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, row) -> None:
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.write([row(0, 0, 1.0), row(1, 0, 1.0)], CELL, 0.5)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], *lines[2:], ""]))
    with pytest.raises(RowsError, match="line 2 is no row"):
        read_rows(path)


def test_a_full_disk_loses_no_row_and_leaves_no_part_of_one(
    tmp_path: Path, row, files_no_longer_than
) -> None:
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.write([row(0, 0, 1.0)], CELL, 0.5)
        before = path.read_bytes()
        with files_no_longer_than(len(before) + 40), pytest.raises(DiskError, match=r"is kept\. Make room"):
            log.write([row(1, 0, 1.0)], CELL, 0.5)
        assert path.read_bytes() == before
        log.write([row(2, 0, 0.0)], CELL, 0.5)
    assert sorted(task for _, task, _ in read_rows(path).rows) == [0, 2]


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowLog(path), pytest.raises(RowsError, match="another process"):
        RowLog(path)
