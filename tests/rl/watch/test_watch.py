from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from envs.types import Trajectory
from rl.launch.cli import main
from rl.launch.compose import load_config
from rl.launch.run import RunFolder, RunState, open_run
from rl.rollout.buffer import Batch
from rl.watch import watch as watching
from rl.watch.alarms import Alarms
from rl.watch.jsonl import read_rows, series
from rl.watch.metrics import batch_metrics
from rl.watch.status import Status, write_status
from rl.watch.watch import Watch, open_watch


def start(root: Path, *more: str) -> tuple[RunFolder, Watch]:
    words = ["experiment=calc", f"run.root={root}", "run.name=mine", "logger=off", *more]
    config = load_config(words)
    folder = open_run(config)
    folder.write_config(words, config)
    return folder, open_watch(folder, config)


def report(folder: RunFolder, watch: Watch, batch: Batch, failed: Trajectory) -> None:
    with watch:
        watch.phase("start", 0, 1)
        watch.sft(10, 20, {"sft/loss": 1.0})
        watch.sample_failed(failed)
        watch.step(4, batch, {"train/loss": float("nan"), **batch_metrics(batch)})
        watch.log("eval", 4, {"eval/calc/greedy/score.mean": 0.5})
        watch.note("a line to keep")
    folder.close(RunState.FINISHED)


def test_everything_lands_where_it_belongs(
    tmp_path: Path, batch: Batch, failed: Trajectory, capsys: pytest.CaptureFixture[str]
):
    folder, watch = start(tmp_path)
    report(folder, watch, batch, failed)
    rows = read_rows(folder.path / "metrics.jsonl")
    assert series(rows, "rollout/all/error") == ([4], [1 / 6])
    assert series(rows, "eval/calc/greedy/score.mean") == ([4], [0.5])
    status = (folder.path / "STATUS.md").read_text()
    for words in ("finished", "not_a_number", "a line to keep", "Failed samples: 1"):
        assert words in status
    assert "a line to keep" in (folder.path / "logs" / "watch.log").read_text()
    shown = capsys.readouterr().out
    assert "imitate 10/20" in shown
    assert "warning not_a_number: train/loss not finite" in shown


def test_a_run_and_its_samples_are_shown(
    tmp_path: Path, batch: Batch, failed: Trajectory, capsys: pytest.CaptureFixture[str]
):
    folder, watch = start(tmp_path)
    report(folder, watch, batch, failed)
    capsys.readouterr()
    root = ["--root", str(tmp_path)]
    assert main(["run", "list", *root]) == 0
    assert "attempt 1 finished" in capsys.readouterr().out
    assert main(["run", "show", "mine", *root]) == 0
    assert "samples: steps 4 to 4" in capsys.readouterr().out
    assert main(["run", "show", "mine", *root, "--step", "4", "--sort", "reward"]) == 0
    assert "calc/2*3" in capsys.readouterr().out
    assert main(["run", "show", "mine", *root, "--failed"]) == 0
    assert "LostError" in capsys.readouterr().out
    assert main(["run", "show", "main", *root]) == 2
    assert "did you mean 'mine'?" in capsys.readouterr().err


def test_what_ended_a_run_stands_in_its_status(tmp_path: Path):
    folder, watch = start(tmp_path)
    with pytest.raises(RuntimeError), watch:
        raise RuntimeError("the disk is full")
    assert "failed: RuntimeError: the disk is full" in (folder.path / "STATUS.md").read_text()


def test_a_disk_that_was_full_for_a_while_ends_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(watching, "_HEARTBEAT_S", 0.01)
    tried, full = threading.Event(), threading.Event()
    full.set()

    def write(run: Path, status: Status, alarms: Alarms) -> None:
        tried.set()
        if full.is_set():
            raise OSError(errno.ENOSPC, "no space left on device")
        write_status(run, status, alarms)

    monkeypatch.setattr(watching, "write_status", write)
    folder, watch = start(tmp_path)
    with watch:
        assert tried.wait(30)
        full.clear()
        deadline = time.monotonic() + 30
        while not (folder.path / "STATUS.md").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        full.set()
    assert "STATUS.md does not say how the run ended" in capsys.readouterr().out
