"""Processes of a run are killed or told to go, and the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from temper import SMALL, Home, steps, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def pid_of(home: Home, role: str) -> int:
    """The newest process of a role, by its own log."""
    log = home.run_folder("mortal") / "logs" / "attempt-1" / f"{role}.log"
    return int(re.findall(r"process (\d+) opens", log.read_text())[-1])


def sampled(home: Home) -> dict[int, set[tuple[int, int]]]:
    """Group and index of the samples that each step trained on."""
    return {
        int(file.stem.removeprefix("step-")): {
            tuple(json.loads(line)["trajectory"]["key"][3:5]) for line in file.read_text().splitlines()
        }
        for file in home.run_folder("mortal").glob("rollouts/step-*.jsonl")
    }


def test_a_run_outlives_its_generators_and_its_learner(home: Home) -> None:
    settings = (*SMALL, "run.name=mortal", "sft.steps=2", "launcher.replicas=2", "checkpoint.every=1")
    driver = home.start(*settings, "rollout.max_in_flight=16", "trainer.steps=5", "logger.console=plain")
    run = home.run_folder("mortal")
    for step, role, number in (
        (1, "generator-0", signal.SIGKILL),
        (2, "generator-1", signal.SIGTERM),
        (3, "learner", signal.SIGKILL),
    ):
        wait_for(lambda step=step: len(set(steps(run))) >= step or driver.poll() is not None, 300)
        assert driver.poll() is None, home.output()
        os.kill(pid_of(home, role), number)
    assert driver.wait(400) == 0, home.output()
    notes = home.output()
    assert "the generator-0 died" in notes and "goes on with" in notes
    assert "the learner died" in notes and "start again from the checkpoint" in notes
    used = sampled(home)
    assert sorted(used) == [1, 2, 3, 4, 5]
    every = [sample for samples in used.values() for sample in samples]
    assert len(every) == len(set(every)) == 5 * 4 * 4
