"""Processes of Ray that outlive a killed driver: found by a mark in their environment, and ended.

A driver that is killed takes Ray's daemons and our actors with it, but Ray's per-node agents may stay for a
while. Everything that a driver starts through Ray carries the driver's mark; the next start ends what carries
the mark of a driver that is dead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "TEMPERING_DRIVER"


def mark() -> None:
    """Marks all processes that this one starts from now on as its own."""
    os.environ[MARK] = f"{os.getpid()}:{psutil.Process().create_time():.2f}"


def unmark() -> None:
    """Lets processes that this one starts from now on outlive the driver."""
    os.environ.pop(MARK, None)


def end_leftovers() -> list[str]:
    """Kills this user's processes whose driver is dead; returns their names."""
    ended: list[str] = []
    for process, driver in _marked():
        if not _lives(driver):
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
    pid, _, created = driver.partition(":")
    try:
        process = psutil.Process(int(pid))
        return process.status() != psutil.STATUS_ZOMBIE and f"{process.create_time():.2f}" == created
    except (psutil.NoSuchProcess, ValueError):
        return False
