from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl.launch.run import DriverRecord
from rl.leftovers import MARK, end_leftovers, mark, start_ticks, unmark

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def dead_driver() -> str:
    driver = subprocess.Popen([sys.executable, "-c", "pass"])
    driver.wait()
    return f"{driver.pid}:1"


def start(value: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(SLEEP, env={**os.environ, MARK: value})
    while b"time.sleep" not in b"".join(part.encode() for part in psutil.Process(process.pid).cmdline()):
        time.sleep(0.01)
    return process


def test_what_a_dead_driver_left_is_ended(dead_driver: str) -> None:
    with start(dead_driver) as left:
        assert len(end_leftovers()) == 1
        assert left.wait(60) < 0
    assert end_leftovers() == []


def test_what_a_living_driver_started_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "")
    mark()
    with start(os.environ[MARK]) as own:
        assert end_leftovers() == []
        assert own.poll() is None
        assert len(end_leftovers(own=True)) == 1
        assert own.wait(60) < 0
    unmark()
    assert MARK not in os.environ


def test_a_pid_that_was_given_to_another_process_is_not_the_driver() -> None:
    with start(f"{os.getpid()}:1") as left:
        assert len(end_leftovers()) == 1
        left.wait(60)


def test_a_process_that_ends_while_it_is_looked_at_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(path: Path) -> str:
        raise ProcessLookupError(errno.ESRCH, "No such process", str(path))

    monkeypatch.setattr(Path, "read_text", ended)
    with pytest.raises(FileNotFoundError, match="process 7 has just ended"):
        start_ticks(7)
    assert not DriverRecord(7, 1, 0.0, "running", 1).alive
