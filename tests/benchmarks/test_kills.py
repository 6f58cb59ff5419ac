"""The kills of a run: what is planned, what is counted, and one of each kind."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import kills_power, kills_verdict
from benchmarks.kills import plan
from benchmarks.kills_places import PLACES, arm, tokens
from benchmarks.kills_power import Power


def test_the_plan_has_all_kinds_of_kills() -> None:
    kills = plan(random.Random(0), quick=False, power=True)
    at_random = Counter(kill.victim for kill in kills if not kill.place)
    assert at_random["driver"] == 10
    assert sum(at_random[name] for name in ("worker", "engine", "trainer", "node")) == 90
    assert at_random["power"] == 20
    at_places = [kill for kill in kills if kill.place]
    assert len(set(at_places)) == 20
    assert {kill.place for kill in at_places} <= set(PLACES)
    assert {kill.victim for kill in plan(random.Random(0), quick=True, power=True)} == {
        "trainer", "engine", "node", "driver", "power",
    }  # fmt: skip
    assert all(kill.victim != "power" for kill in plan(random.Random(0), quick=False, power=False))


def record(run: Path, keys: list[tuple[int, int]], dispatched: list[tuple[int, str]]) -> None:
    folder = run / "rollouts"
    folder.mkdir(parents=True)
    rows = [{"trajectory": {"key": ["t", 50, "tools", *key, 0]}} for key in keys]
    (folder / "step-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = [{"group": group, "task": task, "effort": 50} for group, task in dispatched]
    (folder / "dispatched.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))


def test_lost_and_doubled_samples_are_counted(tmp_path: Path) -> None:
    record(tmp_path, [(0, 0), (0, 1), (1, 0), (1, 0)], [])
    assert kills_verdict.samples(tmp_path, 4) == (1, 1)


def test_another_order_of_tasks_is_found(tmp_path: Path) -> None:
    record(tmp_path / "calm", [], [(0, "a"), (1, "b"), (2, "c")])
    record(tmp_path / "same", [], [(0, "a"), (1, "b"), (1, "b"), (2, "c"), (3, "d")])
    record(tmp_path / "other", [], [(0, "a"), (1, "c"), (2, "b")])
    record(tmp_path / "two", [], [(0, "a"), (0, "b")])
    assert kills_verdict.same_order(tmp_path / "same", tmp_path / "calm", 3)
    assert not kills_verdict.same_order(tmp_path / "same", tmp_path / "calm", 4)
    assert not kills_verdict.same_order(tmp_path / "other", tmp_path / "calm", 3)
    with pytest.raises(ValueError, match="group 0 had"):
        kills_verdict.order(tmp_path / "two")


def test_a_kill_that_costs_more_than_had_waited_is_counted() -> None:
    tally = kills_verdict.Tally()
    tally.died(3, 5)
    tally.died(9, 4)
    assert (tally.tokens, tally.worst, tally.interval, tally.over) == (12, 9, 5, 1)


PASS = """
import sys, os; from pathlib import Path
os.environ['KILLS'] = sys.argv[1]
from benchmarks import kills_places
kills_places.install(); kills_places.count_tokens()
from rl.rollout.wal import TokenLog
from envs.types import TrajectoryKey
log = TokenLog(Path(sys.argv[1], 'log'))
log.consumed([TrajectoryKey('t', 50, 'tools', 0, 0)])
print('alive')
"""


@pytest.mark.parametrize("die", [True, False])
def test_a_process_dies_at_its_place_or_says_that_it_was_there(tmp_path: Path, die: bool) -> None:
    arm(tmp_path, "checkpoint.forgetting", die=die)
    process = subprocess.Popen([sys.executable, "-c", PASS, tmp_path], stdout=subprocess.PIPE)
    said, _ = process.communicate()
    assert (process.returncode, said) == ((-9, b"") if die else (0, b"alive\n"))
    assert (tmp_path / "reached").read_text() == str(process.pid)
    assert tokens(tmp_path, process.pid) == (0, 0, 0)


@pytest.mark.parametrize("held_elsewhere", [False, True])
def test_what_was_not_synced_is_gone_after_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_elsewhere: bool
) -> None:
    if kills_power.offered():
        return  # it needs root and loop devices
    monkeypatch.setattr(kills_power, "_BUSY_S", 0.5)
    power = Power(tmp_path / "image", tmp_path / "folder", 32)
    power.make()
    words = ["unshare", "--mount", "sh", "-c", "echo; exec sleep 600"]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE) if held_elsewhere else None
    try:
        if holder is not None and holder.stdout is not None:
            holder.stdout.readline()
        synced = os.open(power.folder / "synced", os.O_CREAT | os.O_WRONLY)
        os.write(synced, b"kept")
        os.fsync(synced)
        os.write(synced, b"lost")
        os.close(synced)
        (power.folder / "new").write_text("lost")
        power.lose()
        power.back()
        assert (power.folder / "synced").read_bytes() == b"kept"
        assert not (power.folder / "new").exists()
    finally:
        if holder is not None:
            holder.kill()
            holder.communicate()
        power.end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_kill_of_each_kind_loses_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kills", "--quick"], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "lost 0 duplicated 0 left 0" in done.stdout.splitlines()[-1]
