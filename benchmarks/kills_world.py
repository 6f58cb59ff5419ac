"""The run that `benchmarks.kills` kills: how it is started, how far it is, and which process is which."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kills_places import FOLDER, tokens
from rl.rollout.frames import Damage, read_header, scan
from rl.rollout.steps import Steps

REPOSITORY = Path(__file__).parents[1]
_LOOK_S, _PATIENCE_S = 0.05, 900.0


class Stuck(RuntimeError):
    """The run neither goes on nor ends."""


@dataclass(slots=True)
class World:
    """A run and all that it starts: its files below `root`, what must outlive a loss of power in `kept`.

    `segments` are the files of the token log that have been counted, with their tokens.
    """

    root: Path
    kept: Path
    settings: tuple[str, ...]
    attempts: int = 0
    driver: subprocess.Popen[bytes] | None = None
    segments: dict[Path, int] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.root / "runs" / "killed"

    @property
    def output(self) -> Path:
        """What the drivers printed."""
        return self.kept / "output.txt"

    def start(self) -> None:
        """Starts the driver, the first time or again."""
        command = [sys.executable, "-m", "benchmarks.kills_places", "train", *self.settings]
        command += ["run.name=killed", f"run.root={self.root / 'runs'}"]
        command += ["resume=true"] if self.run.exists() else []
        env = {**os.environ, "TEMPERING_HOME": str(self.root / "home"), FOLDER: str(self.kept)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        self.attempts += 1
        with self.output.open("ab") as output:
            self.driver = subprocess.Popen(
                command, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=self.kept
            )

    @property
    def ended(self) -> bool:
        """Whether the driver has ended."""
        return self.driver is None or self.driver.poll() is not None

    def finished(self) -> bool:
        """Whether the run is done."""
        record = self.run / "driver.json"
        return record.exists() and json.loads(record.read_text())["state"] == "finished"

    def progress(self) -> int:
        """Bytes that the run has logged: tokens and numbers."""
        files = [*self.run.glob("token_log/**/*.wal"), self.run / "metrics.jsonl"]
        return sum(_size(file) for file in files)

    def wait(self, condition: Callable[[], bool], what: str) -> bool:
        """Waits until the condition holds (True) or the driver has ended (False).

        Raises:
            Stuck: Neither comes.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if self.ended:
                return condition()
            if time.monotonic() > deadline:
                raise Stuck(
                    f"waited {_PATIENCE_S:.0f} s for {what}; the driver lives and says:\n{self.tail()}"
                )
            time.sleep(_LOOK_S)
        return True

    def tail(self) -> str:
        """The end of what the drivers printed."""
        return self.output.read_text(errors="replace")[-3000:]

    def steps(self) -> int:
        """The optimiser steps whose samples are recorded."""
        return len([*self.run.glob("rollouts/step-*.jsonl")])

    def checkpoints(self) -> list[str]:
        """The names of whole checkpoints."""
        return sorted(path.name for path in self.run.glob("checkpoints/step-*"))

    def find(self, victim: str) -> int | None:
        """Returns the process to kill: driver, node, trainer, or the one in which workers and engine run."""
        if victim == "driver":
            return None if self.ended or self.driver is None else self.driver.pid
        if victim == "node":
            record = self.root / "home" / "node" / "node.json"
            return _living(json.loads(record.read_text())["pid"]) if record.exists() else None
        if victim in ("worker", "engine"):
            alive = self.holders()
            return alive[self.attempts % len(alive)] if alive else None
        logs = f"{self.run}/logs/"
        return next((pid for pid in self.processes() if _writes(pid, logs, "learner")), None)

    def holders(self) -> list[int]:
        """Living processes that hold a token log: those of workers and engine."""
        locks = sorted(self.run.glob("token_log/**/lock"))
        return [pid for lock in locks if (pid := _living(int(lock.read_text() or 0)))]

    def processes(self) -> list[int]:
        """Living processes of the run."""
        return list(_marked(f"TEMPERING_HOME={self.root / 'home'}"))

    def kill(self, pid: int) -> None:
        """Kills one process, and reaps it when it is the driver."""
        _kill(pid)
        if self.driver is not None and pid == self.driver.pid:
            self.driver.wait()

    def kill_all(self) -> None:
        """Kills all processes of the run: nothing of it lives when this returns."""
        while living := self.processes():
            for pid in living:
                _kill(pid)
            if self.driver is not None:
                self.driver.poll()
            time.sleep(_LOOK_S)

    def wait_until_ended(self) -> None:
        """Waits for the driver's own end, and for that of the processes that hold its token log.

        Raises:
            Stuck: They do not end.
        """
        self.wait(lambda: self.ended, "the end of the driver")
        deadline = time.monotonic() + _PATIENCE_S
        while self.find("engine") is not None:
            if time.monotonic() > deadline:
                raise Stuck("the token log's process outlives its driver")
            time.sleep(_LOOK_S)

    def regenerated(self, pids: list[int]) -> tuple[int, int]:
        """Returns how many tokens of dead processes are not on disk, and the most that waited for a flush.

        Call it once after each death, before the next attempt starts.
        """
        counts = [tokens(self.kept, pid) for pid in pids]
        logged = 0
        for path in sorted(self.run.glob("token_log/**/*.wal")):
            if path not in self.segments:
                self.segments[path] = _rows(path)
                logged += self.segments[path]
        appended = sum(count[0] for count in counts)
        return max(appended - logged, 0), max((count[2] for count in counts), default=0)


def _rows(path: Path) -> int:
    """Tokens in whole records of a segment; 0 when its header is not whole."""
    data = path.read_bytes()
    try:
        found = scan(data, read_header(data, path.name).format, Damage())
    except ValueError:
        return 0
    return int(Steps.read(data, found).counts.sum())


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _living(pid: int) -> int | None:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else pid


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _writes(pid: int, folder: str, name: str) -> bool:
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith(folder) and Path(link).name.startswith(name) for link in links)


def _marked(mark: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if mark in environ and _living(int(folder.name)):
            yield int(folder.name)
