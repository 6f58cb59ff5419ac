"""Runs the command line as a user does, in a home of its own, and looks for what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl.watch.jsonl import read_rows

ROOT = Path(__file__).parents[2]
SMALL = (
    "experiment=calc",
    "sft.steps=20",
    "sft.batch_size=16",
    "trainer.steps=6",
    "rollout.groups_per_step=4",
    "rollout.max_in_flight=32",
    "algorithm.group_size=4",
    "eval.tasks=10",
    "eval.samples=1",
    "checkpoint.every=2",
    "launcher.sft_threads=1",
    "logger.wandb=disabled",
)


@dataclass
class Home:
    """A user's home: runs, sandbox node, and the environment of their shell."""

    path: Path
    backend: str = "bubblewrap"

    @property
    def env(self) -> dict[str, str]:
        own = {"TEMPERING_HOME": str(self.path / "home"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return {**os.environ, **own}

    def run_folder(self, name: str) -> Path:
        return self.path / "runs" / name

    def command(self, *overrides: str) -> list[str]:
        place = [f"run.root={self.path / 'runs'}", f"sandbox.backend={self.backend}"]
        return [sys.executable, "-m", "rl.launch.cli", "train", *place, *overrides]

    def train(self, *overrides: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*overrides),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        with (self.path / "output.txt").open("ab") as output:
            return subprocess.Popen(
                self.command(*overrides), env=self.env, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def output(self) -> str:
        return (self.path / "output.txt").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All living processes that were started in this home."""
        mark, found = f"TEMPERING_HOME={self.path / 'home'}", []
        for process in psutil.process_iter():
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
                if mark in environ.split("\0") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def wait_until_gone(self, timeout: float) -> list[psutil.Process]:
        """Waits until no process of this home lives; returns those that still do."""
        wait_for(lambda: not self.processes(), timeout)
        return self.processes()

    def clean_up(self) -> None:
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue


def steps(run: Path) -> list[int]:
    """The optimiser steps that a run has logged."""
    return [row.step for row in read_rows(run / "metrics.jsonl") if row.family == "train"]


def wait_for(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()
