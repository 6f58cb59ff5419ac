"""Kills the driver of a small `calc` run at random moments and resumes it: `python -m benchmarks.kills`.

Each kill (SIGKILL) comes after progress since the last. At the end every sample of every optimiser step must
stand in the run's record exactly once, in the groups' own order, and nothing may still run. The last line is
`kills K lost L duplicated D left R`; the exit code is 1 when any of the last three is not 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

STEPS, GROUPS, SIZE = 16, 4, 4
_SETTINGS = (
    "experiment=calc",
    "run.name=killed",
    "sft.steps=10",
    "sft.batch_size=16",
    f"trainer.steps={STEPS}",
    f"rollout.groups_per_step={GROUPS}",
    "rollout.max_in_flight=32",
    f"algorithm.group_size={SIZE}",
    "eval.tasks=10",
    "eval.samples=1",
    "checkpoint.every=2",
    "launcher.sft_threads=1",
    "logger.wandb=disabled",
    "logger.console=plain",
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the run and everything that it starts lives."""

    root: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.root / "killed"

    @property
    def env(self) -> dict[str, str]:
        """The environment of the run, which also marks its processes."""
        return {**os.environ, "TEMPERING_HOME": str(self.root / "home")}

    def start(self, *, resume: bool) -> subprocess.Popen[bytes]:
        """Starts the driver."""
        command = [sys.executable, "-m", "rl.launch.cli", "train", *_SETTINGS, f"run.root={self.root}"]
        with (self.root / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [*command, f"resume={str(resume).lower()}"], env=self.env, stdout=output, stderr=output
            )

    def progress(self) -> int:
        """Bytes that the run has logged: tokens and numbers."""
        files = [*self.run.glob("token_log/*"), self.run / "metrics.jsonl"]
        return sum(file.stat().st_size for file in files if file.exists())

    def processes(self) -> list[int]:
        """Living processes of the run."""
        mark, found = f"TEMPERING_HOME={self.root / 'home'}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


def main() -> int:
    """Runs, kills, resumes and counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        done = sum(_kill_once(place, draw, resume=number > 0) for number in range(arguments.kills))
        code = place.start(resume=place.run.exists()).wait()
        if code != 0:
            print((place.root / "output.txt").read_text()[-3000:])
            return 1
        lost, duplicated = count(place.run)
        left = _left(place)
    print(f"kills {done} lost {lost} duplicated {duplicated} left {left}")
    return int(bool(lost or duplicated or left))


def count(run: Path) -> tuple[int, int]:
    """Returns how many samples are missing from the record of all steps, and how many stand there twice."""
    keys: Counter[tuple[int, int]] = Counter()
    for file in run.glob("rollouts/step-*.jsonl"):
        for line in file.read_text().splitlines():
            group, index = json.loads(line)["trajectory"]["key"][3:5]
            keys[group, index] += 1
    return max(STEPS * GROUPS * SIZE - len(keys), 0), sum(number - 1 for number in keys.values())


def _kill_once(place: Place, draw: random.Random, *, resume: bool) -> int:
    """Starts the driver and kills it a random while after its first progress; returns 1 when it lived."""
    before = place.progress()
    driver = place.start(resume=resume and place.run.exists())
    while driver.poll() is None and place.progress() <= before:
        time.sleep(0.05)
    time.sleep(draw.uniform(0, 6))
    if driver.poll() is not None:
        return 0
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    return 1


def _left(place: Place) -> int:
    """Waits for what may still be ending, and returns how many processes do not."""
    deadline = time.monotonic() + 20
    while place.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    return len(place.processes())


if __name__ == "__main__":
    sys.exit(main())
