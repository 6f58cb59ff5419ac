"""Where teachers' hidden states wait until the loss has used them: host memory, or files that are mapped.

A step of long samples has more of them than memory: as files only what the loss is looking at is in memory,
and the page cache keeps the rest as long as there is room.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np


class HiddenStore:
    """Keeps arrays until `clear`.

    Args:
        folder: for files, emptied at once; None keeps arrays in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._count = folder, 0
        self.bytes = 0
        if folder is not None:
            self._empty(folder)

    def put(self, states: np.ndarray) -> np.ndarray:
        """Stores hidden states [m, d] and returns them, mapped from their file when there is one."""
        self.bytes += states.nbytes
        if self._folder is None or not states.size:
            return states
        path = self._folder / f"{self._count}.npy"
        self._count += 1
        np.save(path, states)
        return np.load(path, mmap_mode="r+")

    def clear(self) -> None:
        """Removes everything; arrays handed out before are not to be used any more."""
        self.bytes = 0
        if self._folder is not None:
            self._empty(self._folder)

    def _empty(self, folder: Path) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self._count = 0
