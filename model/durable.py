"""Files and folders that are whole whenever they have their name, also after a loss of power."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(partial: Path, out: Path) -> None:
    """Gives a finished file or folder its name once all that it holds is on disk; replaces a file.

    Raises:
        OSError: There is a folder with something in it, or the disk is full.
    """
    for path in (*partial.rglob("*"), partial):
        if not path.is_symlink():
            sync(path)
    partial.replace(out)
    sync(out.parent)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `out` when the block ends; after an error nothing is left of it.

    Raises:
        OSError: There is a folder with something in it, or nothing can be written.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        publish(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
