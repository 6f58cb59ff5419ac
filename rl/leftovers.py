"""Processes of Ray that outlive a driver: found by a mark in their environment, and ended.

A driver that is killed takes Ray's daemons and our actors with it, but Ray's per-node agents may stay for a
while; on a busy machine they may outlive an orderly end too. Everything that a driver starts through Ray has
the driver's mark: at its end it ends what is left, and the next start does it for one that was killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "TEMPERING_DRIVER"


def mark() -> None:
    """Marks all processes that this one starts from now on as its own."""
    os.environ[MARK] = _name(psutil.Process())


def unmark() -> None:
    """Lets processes that this one starts from now on outlive the driver."""
    os.environ.pop(MARK, None)


def end_leftovers(*, own: bool = False) -> list[str]:
    """Kills this user's processes whose driver is dead, with `own` also this one's; returns their names."""
    ended: list[str] = []
    this = _name(psutil.Process())
    for process, driver in _marked():
        if (own and driver == this) or not _lives(driver):
            try:
                name = process.name()
                process.kill()
            except psutil.NoSuchProcess:
                continue
            ended.append(name)
    return ended


def _marked() -> Iterator[tuple[psutil.Process, str]]:
    prefix = f"{MARK}=".encode()
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid():
                continue
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except (OSError, psutil.Error):
            continue
        for entry in environ:
            if entry.startswith(prefix):
                yield process, entry.removeprefix(prefix).decode(errors="replace")


def _lives(driver: str) -> bool:
    try:
        process = psutil.Process(int(driver.partition(":")[0]))
        return process.status() != psutil.STATUS_ZOMBIE and _name(process) == driver
    except (psutil.NoSuchProcess, FileNotFoundError, ValueError):
        return False


def start_ticks(pid: int) -> int:
    """Returns when a process began, in ticks since boot: with its pid its name, which no clock change moves.

    Raises:
        FileNotFoundError: There is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError as error:  # it ended between the file's opening and its reading
        raise FileNotFoundError(f"process {pid} has just ended") from error
    return int(stat.rsplit(")", 1)[1].split()[19])


def _name(process: psutil.Process) -> str:
    return f"{process.pid}:{start_ticks(process.pid)}"
