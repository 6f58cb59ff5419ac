"""Three ways back to the state of a sandbox give the same files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sandbox_recovery import Case, Way, draw
from sandbox.backends import cgroups


def test_ways_are_in_order_only_if_each_is_faster_than_the_next() -> None:
    def case(*times: float) -> Case:
        names = ("pause", "snapshot", "replay")
        return Case(10, 0, {name: Way(ms, 1, True) for name, ms in zip(names, times, strict=True)})

    assert case(1.0, 2.0, 3.0).ordered
    assert not case(1.0, 3.0, 2.0).ordered and not case(1.0, 1.0, 2.0).ordered


def test_the_picture_has_all_histories(tmp_path: Path) -> None:
    cases = [
        Case(count, ms, {name: Way(5.0 * count, count, True) for name in ("pause", "snapshot", "replay")})
        for ms in (0, 50)
        for count in (10, 100)
    ]
    draw(cases, tmp_path / "recovery.png")
    assert (tmp_path / "recovery.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.skipif("freezer" not in cgroups.controllers(), reason="nothing here can pause a sandbox")
def test_pause_snapshot_and_replay_give_the_same_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.sandbox_recovery", "--commands", "100", "--sleep-ms", "20"]
    command += ["--picture", str(tmp_path / "recovery.png")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].endswith("commands 100 equal yes")
