"""The stream of demonstrations out of files: shuffled anew each epoch, and resumable at the exact sample.

The order is a function of the seed and the epoch, so a position (how many rows were taken, and how much
of the last one) is all that has to be kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rl.trainers.conversations import Renderer
from rl.trainers.data import Sample
from rl.trainers.data_files import DataError, Rows, open_rows


class FileSamples:
    """Samples of several files, without end.

    Args:
        paths: the files.
        renderer: makes samples of rows.
        seed: of the shuffling.
    """

    def __init__(self, paths: Sequence[str], renderer: Renderer, seed: int) -> None:
        self._files = [open_rows(path) for path in paths]
        self._renderer, self._seed = renderer, seed
        self._ends = np.cumsum([len(rows) for rows in self._files])
        self._position = 0
        self._taken = 0
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def epoch(self) -> float:
        """How many times all rows have been taken."""
        return self._position / len(self)

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        """The next sample. Raises DataError when its row cannot be used, or no row of an epoch gives one."""
        for _ in range(len(self) + 1):
            samples = self._samples(self._at(self._position))
            if self._taken < len(samples):
                self._taken += 1
                sample = samples[self._taken - 1]
                if self._taken == len(samples):
                    self._position, self._taken = self._position + 1, 0
                return sample
            self._position, self._taken = self._position + 1, 0
        raise DataError("no row of sft.data gives a sample: all trajectories are below sft.min_score")

    def in_order(self, limit: int) -> list[Sample]:
        """The first `limit` samples in the order of the files, for validation."""
        found: list[Sample] = []
        for index in range(len(self)):
            found += self._samples(index)
            if len(found) >= limit:
                break
        return found[:limit]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self)))
        return int(self._order[1][place])

    def _samples(self, index: int) -> list[Sample]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        rows: Rows = self._files[number]
        own = index - (int(self._ends[number - 1]) if number else 0)
        return self._renderer.samples(rows.row(own), rows.place(own))

    def state_dict(self) -> dict[str, Any]:
        """The exact position, and what tells whether the files are the same."""
        return {"position": self._position, "taken": self._taken, "seed": self._seed, "files": self._print()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at a position.

        Raises:
            DataError: It was taken in other files or another order.
        """
        if (state["files"], state["seed"]) != (self._print(), self._seed):
            raise DataError(
                "sft.data (number of rows, or first or last row) or run.seed are not those the checkpoint "
                "was written under, so its position means nothing: resume with the same files and seed"
            )
        self._position, self._taken = int(state["position"]), int(state["taken"])

    def _print(self) -> list[list[int]]:
        return [
            [len(rows), *(zlib.crc32(repr(rows.row(i)).encode()) for i in (0, len(rows) - 1))]
            for rows in self._files
        ]
