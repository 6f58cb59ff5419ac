"""`temper train` as a user runs it: it ends with its line, and nothing stays behind."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from temper import SMALL, Home, steps, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
LINE = (
    r"^calc: sft (?P<sft>[\d.]+) sampled (?P<sampled>[\d.]+) greedy (?P<greedy>[\d.]+) "
    r"tool_use (?P<tool>[\d.]+) steps (?P<steps>\d+) seconds (?P<seconds>\d+)"
)


def closing_line(text: str) -> dict[str, float]:
    found = re.search(LINE, text, re.MULTILINE)
    assert found, text[-3000:]
    return {name: float(value) for name, value in found.groupdict().items()}


def test_a_run_ends_with_its_line_its_picture_and_nothing_left_behind(home: Home) -> None:
    done = home.train(*SMALL, "run.name=small")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = home.run_folder("small")
    assert closing_line(done.stdout)["steps"] == 6
    assert str(run) in done.stdout
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert home.wait_until_gone(60) == []
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"sft", "train", "rollout", "eval", "sys"} <= {row["family"] for row in rows}
    assert not any(row["metrics"].get("rollout/all/error", 0.0) for row in rows)


def test_with_learning_rate_zero_nothing_changes(home: Home) -> None:
    still = ("trainer.optimizer.learning_rate=0", "eval.tasks=40", "sft.steps=100", "sft.batch_size=32")
    done = home.train(*SMALL, "run.name=still", *still)
    line = closing_line(done.stdout)
    assert abs(line["sampled"] - line["sft"]) <= 0.05


def test_ctrl_c_ends_within_ten_seconds_and_leaves_nothing(home: Home) -> None:
    driver = home.start(*SMALL, "run.name=stopped", "trainer.steps=500")
    assert wait_for(lambda: len(steps(home.run_folder("stopped"))) >= 2, 200), home.output()[-2000:]
    pressed = time.monotonic()
    driver.send_signal(signal.SIGINT)
    code = driver.wait(30)
    assert time.monotonic() - pressed < 10
    assert code == 130
    assert home.wait_until_gone(60) == []
    assert "resume=true" in home.output()


def test_sigterm_while_processes_start_ends_like_ctrl_c(home: Home) -> None:
    driver = home.start(*SMALL, "run.name=early")
    assert wait_for(lambda: "start the learner" in home.output(), 100), home.output()[-2000:]
    time.sleep(1)
    driver.terminate()
    assert driver.wait(100) == 130
    assert home.wait_until_gone(60) == []
    assert "resume=true" in home.output()
    assert json.loads((home.run_folder("early") / "driver.json").read_text())["state"] == "interrupted"


def test_after_a_kill_the_next_start_says_what_it_found_and_resume_finishes(home: Home) -> None:
    driver = home.start(*SMALL, "run.name=killed")
    assert wait_for(lambda: len(steps(home.run_folder("killed"))) >= 3, 200), home.output()[-2000:]
    driver.kill()
    driver.wait()
    refused = home.train(*SMALL, "run.name=killed")
    assert refused.returncode == 2
    assert "killed" in refused.stderr
    assert "newest checkpoint at step" in refused.stderr
    assert "resume=true" in refused.stderr
    done = home.train(*SMALL, "run.name=killed", "resume=true")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert closing_line(done.stdout)["steps"] == 6
    assert "resumed at step" in done.stdout
    trained = steps(home.run_folder("killed"))
    assert sorted(set(trained)) == [1, 2, 3, 4, 5, 6]
    assert home.wait_until_gone(60) == []
    assert samples_are_trained_once(home.run_folder("killed"))


def samples_are_trained_once(run: Path) -> bool:
    """In the line of steps that led to the final weights, all samples are there and none stands twice."""
    rows = [
        json.loads(line)
        for file in sorted((run / "rollouts").glob("step-*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    keys = [(row["trajectory"]["key"][3], row["trajectory"]["key"][4]) for row in rows]
    return len(keys) == len(set(keys)) == 6 * 16
