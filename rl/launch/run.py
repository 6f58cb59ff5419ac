"""Run folders: where everything of one run lies, and who may write there.

A run never lands in another's folder by accident: an existing name needs `run.resume=true` or
`run.clean=true`, a folder whose driver still lives is refused, and one whose driver died says so.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from rl.launch.config import RunConfig
from rl.leftovers import start_ticks

_DRIVER = "driver.json"
_LOCK = ".lock"


class RunState(StrEnum):
    """How far a run got. A run that was killed still says `running`, and its driver is dead."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class RunFolderError(ValueError):
    """A run name that cannot be used now: what was found there, and what to do."""


@dataclass(frozen=True, slots=True)
class DriverRecord:
    """Which process drives (or drove) a run, and how that ended."""

    pid: int
    created: int
    started: float
    state: str
    attempt: int

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        try:
            return start_ticks(self.pid) == self.created
        except FileNotFoundError:
            return False


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run; `found` says what an earlier attempt left (empty for a new run)."""

    path: Path
    attempt: int
    found: str = ""

    @property
    def name(self) -> str:
        """The run's name, which also owns its sandboxes."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def token_log(self) -> Path:
        """Where the token log lies."""
        return self.path / "token_log"

    @property
    def logs(self) -> Path:
        """Where the processes of this attempt write their logs."""
        return self.path / "logs" / f"attempt-{self.attempt}"

    def close(self, state: RunState) -> None:
        """Records how this attempt ended."""
        record = read_driver(self.path)
        assert record is not None
        _write_driver(self.path, record, state)

    def write_config(self, overrides: list[str], config: RunConfig) -> None:
        """Writes what was typed (`overrides.yaml`) and what it resolved to (`resolved.yaml`)."""
        write_atomically(self.path / "overrides.yaml", yaml.safe_dump(overrides))
        write_atomically(self.path / "resolved.yaml", yaml.safe_dump(as_plain(config), sort_keys=False))


def open_run(config: RunConfig) -> RunFolder:
    """Makes or takes over the folder of a run.

    Raises:
        RunFolderError: The name is taken, its driver lives, or there is nothing to resume.
    """
    path = _path(config)
    try:
        with _alone(path.parent):
            return _open(config, path, _checked(config, path))
    except OSError as error:
        raise _unusable(path, error) from error


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Keeps two starts at the same moment from both finding a name free."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK).open("w") as file:
        with suppress(OSError):  # a file system that has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_name(config: RunConfig) -> None:
    """Refuses a name that `open_run` would refuse, and touches nothing.

    Raises:
        RunFolderError: The name is taken, its driver lives, its folder cannot be read, or there is nothing to
            resume.
    """
    path = _path(config)
    try:
        _checked(config, path)
    except OSError as error:
        raise _unusable(path, error) from error


def _path(config: RunConfig) -> Path:
    return Path(config.run.root).expanduser().resolve() / (config.run.name or _fresh_name(config))


def _unusable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"the run's folder {path} cannot be used ({error.strerror}); choose another run.root or repair it"
    )


def _checked(config: RunConfig, path: Path) -> DriverRecord | None:
    name = path.name
    record = read_driver(path)
    if record is not None and record.state == RunState.RUNNING and record.alive:
        raise RunFolderError(
            f"run {name!r} is being driven by process {record.pid}; wait for it, stop it "
            f"(kill {record.pid}), or choose another run.name"
        )
    if record is None and path.exists() and any(path.iterdir()):
        raise RunFolderError(
            f"{path} exists and is not a run of this program; choose another run.name or move it away"
        )
    if path.exists() and not (config.run.resume or config.run.clean):
        raise RunFolderError(
            f"run {name!r} exists in {path.parent} ({describe(path)}); continue it with run.resume=true, "
            "start it anew with run.clean=true, or choose another run.name"
        )
    if config.run.resume and record is None:
        raise RunFolderError(f"there is no run {name!r} in {path.parent} to resume; {_known(path.parent)}")
    return record


def _open(config: RunConfig, path: Path, record: DriverRecord | None) -> RunFolder:
    found = describe(path) if record is not None and config.run.resume else ""
    if config.run.clean and path.exists():
        shutil.rmtree(path)
    return _take(path, 1 if record is None or config.run.clean else record.attempt + 1, found)


def describe(path: Path) -> str:
    """Says in one clause how a run stands: how its last attempt ended and its newest checkpoint."""
    record = read_driver(path)
    if record is None:
        return "not a run of this program"
    state = "killed" if record.state == RunState.RUNNING and not record.alive else record.state
    steps = sorted(int(p.name.removeprefix("step-")) for p in (path / "checkpoints").glob("step-*"))
    newest = f"newest checkpoint at step {steps[-1]}" if steps else "no checkpoint yet"
    return f"attempt {record.attempt} {state}, {newest}"


def read_driver(path: Path) -> DriverRecord | None:
    """Returns who drives or drove the run in `path`, or None when there is no run."""
    try:
        return DriverRecord(**json.loads((path / _DRIVER).read_text()))
    except FileNotFoundError:
        return None


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file so that a reader sees the old or the new text, also after a loss of power."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def as_plain(config: RunConfig) -> dict[str, Any]:
    """Returns a configuration as JSON values; of exact mode, whether it is on."""
    plain = config.model_dump(mode="json")
    plain["model"]["exact"] = config.exactness.on
    return plain


def _take(path: Path, attempt: int, found: str) -> RunFolder:
    folder = RunFolder(path, attempt, found)
    folder.logs.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    _write_driver(path, DriverRecord(pid, start_ticks(pid), time.time(), "", attempt), RunState.RUNNING)
    return folder


def _write_driver(path: Path, record: DriverRecord, state: RunState) -> None:
    write_atomically(path / _DRIVER, json.dumps(asdict(record) | {"state": str(state)}))


def _fresh_name(config: RunConfig) -> str:
    return f"{config.env.title.replace('+', '-')}-{config.model.preset}-{secrets.token_hex(3)}"


def _known(root: Path) -> str:
    names = sorted(p.parent.name for p in root.glob(f"*/{_DRIVER}"))
    return f"runs there: {', '.join(names)}" if names else "there are no runs there"
