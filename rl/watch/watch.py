"""Everything a run reports goes through one object, which sends it to disk, W&B, terminal and alarms alike.

A failure of a report never stops training, except that metrics.jsonl must be writable.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from envs.types import Trajectory
from model.durable import sync
from rl import effort_curve
from rl.effort_curve import CurvePoint
from rl.launch.config import RunConfig
from rl.launch.run import RunFolder, as_plain
from rl.watch.alarms import Alarms
from rl.watch.console import Screen, open_screen
from rl.watch.jsonl import FILE_NAME, JsonlLog, row
from rl.watch.metrics import TrainingBatch, split_families
from rl.watch.rollouts import RolloutLog
from rl.watch.status import Status, write_status
from rl.watch.wandb_log import WandbLog, WandbSettings

_HEARTBEAT_S = 5.0


class Watch:
    """Reports one run. Use it as a context manager; its methods may be called from one thread.

    Args:
        run: The run's folder.
        wandb: The W&B log.
        screen: The terminal.
        alarms: The rules to check.
        total_steps: Optimiser steps after the warm start, for the time left.
        stage: What those steps do.
    """

    def __init__(
        self,
        run: Path,
        wandb: WandbLog,
        screen: Screen,
        alarms: Alarms,
        total_steps: int,
        stage: str = "reinforce",
    ) -> None:
        self._run, self._wandb, self._screen, self._alarms = run, wandb, screen, alarms
        self._total, self._stage = total_steps, stage
        self._jsonl = JsonlLog(run / FILE_NAME)
        self._rollouts = RolloutLog(run)
        self._status = Status(run.name)
        self._lock = threading.RLock()
        self._failed = 0
        self._progress = time.monotonic()
        self._stop = threading.Event()
        self._log = (run / "logs" / "watch.log").open("a", encoding="utf-8", buffering=1)
        self._thread = threading.Thread(target=self._heartbeat, name="watch", daemon=True)
        self._thread.start()

    def step(self, version: int, batch: TrainingBatch, metrics: Mapping[str, float]) -> None:
        """Reports an optimiser step after the warm start; `version` counts them from 1."""
        trained = sum(len(group.trajectories) for group in batch.groups)
        with self._lock:
            failed, self._failed = self._failed, 0
        extra = {"rollout/all/error": failed / max(trained + failed, 1)}
        everything = {**metrics, **extra}
        self._rollouts.step(version, batch)
        self._write(version, everything)
        self._shown(self._stage, version, self._total, everything)

    def sft(self, done: int, total: int, metrics: Mapping[str, float]) -> None:
        """Reports the warm start after `done` of `total` steps."""
        self._write(done, metrics)
        self._shown("imitate", done, total, metrics)

    def log(self, family: str, step: int, metrics: Mapping[str, float]) -> None:
        """Reports numbers of one family (`eval`) at a step of its own axis."""
        wrong = [name for name in metrics if not name.startswith(f"{family}/")]
        assert not wrong, f"{wrong} are not of family {family}"
        self._write(step, metrics)

    def curve(self, points: Sequence[CurvePoint]) -> None:
        """Keeps a cost-quality curve: in the run's folder, on the terminal and in W&B."""
        effort_curve.write(points, self._run)
        for line in effort_curve.table(points).splitlines():
            self.note(line)
        names, rows = effort_curve.columns(points)
        with self._lock:
            self._wandb.plot("eval/effort_curve", names, rows, self._run / effort_curve.PICTURE)

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Says what is going on now, and how far it is."""
        self._shown(name, done, total, {})

    def note(self, text: str) -> None:
        """Keeps a line: on the terminal, in logs/watch.log and in STATUS.md."""
        with self._lock:
            self._screen.note(text)
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._status.notes.append(text)

    def sample_failed(self, trajectory: Trajectory) -> None:
        """Reports a sample that could not be used."""
        with self._lock:
            self._failed += 1
            self._status.failed += 1
            self._rollouts.failed(trajectory)

    def dispatched(self, group: int, task: str, effort: int) -> None:
        """Keeps which task a group has that starts now."""
        with self._lock:
            self._rollouts.dispatched(group, task, effort)

    def sync(self) -> None:
        """Waits until numbers and samples are on disk; a checkpoint that has used them comes after it."""
        self._rollouts.sync()
        sync(self._run / FILE_NAME)

    def close(self, outcome: str, exit_code: int = 0) -> None:
        """Ends the report; `outcome` (finished, failed: why, interrupted) stands in STATUS.md."""
        self._stop.set()
        self._thread.join()
        self._status.phase = outcome
        self._wandb.close(exit_code)
        with self._lock:
            try:
                write_status(self._run, self._status, self._alarms)
            except OSError as error:
                self._screen.note(f"STATUS.md does not say how the run ended: {error}")
            self._screen.close()
            self._jsonl.close()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close("finished")
        elif isinstance(error, KeyboardInterrupt):
            self.close("interrupted", 130)
        else:
            self.close(f"failed: {type(error).__name__}: {error}", 1)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            for family, values in split_families(metrics).items():
                entry = row(family, step, values)
                self._jsonl.write(entry)
                self._wandb.write(entry)
            self._tell(self._alarms.check(metrics))

    def _shown(self, phase: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._progress = time.monotonic()
            self._screen.figures(metrics)
            self._screen.phase(phase, done, total)
            self._status.update(phase, done, total, metrics)

    def _tell(self, news: list[str]) -> None:
        for text in news:
            self.note(text)
            if text.startswith("warning") and not text.endswith(": over"):
                self._wandb.alert("tempering", text)

    def _heartbeat(self) -> None:
        while not self._stop.wait(_HEARTBEAT_S):
            with suppress(OSError):  # of a disk that is full: there is room again at a later beat
                self._beat()

    def _beat(self) -> None:
        disk = shutil.disk_usage(self._run)
        with self._lock:
            self._tell(self._alarms.check_silence(time.monotonic() - self._progress))
            self._tell(self._alarms.check_disk(disk.free / disk.total))
            write_status(self._run, self._status, self._alarms)


def open_watch(folder: RunFolder, config: RunConfig) -> Watch:
    """Opens the report of a run; what it cannot send to W&B it says on the terminal."""
    screen = open_screen(config.logger.console, f"run {folder.name} in {folder.path}")
    settings = WandbSettings(
        mode=config.logger.wandb,
        project=config.logger.project,
        name=folder.name,
        run_id=folder.name,
        folder=folder.path,
    )
    log = WandbLog(settings, as_plain(config), screen.note)
    screen.note(f"W&B is {log.mode}; all numbers are in {folder.path / FILE_NAME}")
    stage = "distil" if config.opd.teachers else "reinforce"
    alarms = Alarms(staleness_bound=config.rollout.staleness, exact=config.exactness.on)
    return Watch(folder.path, log, screen, alarms, config.learning_steps, stage)
