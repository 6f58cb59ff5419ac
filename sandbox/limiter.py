"""How fast a node starts sandboxes: beyond what its engine bears, starts only make each other slower."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sandbox.errors import RefusedError

STARTS_PER_CORE_S: Mapping[str, float] = {"docker": 3.0, "gvisor": 2.0}
"""Measured on Docker 20.10: 6 starts a second on two cores, and no more however many run at once."""

LIGHT_STARTS_PER_CORE_S = 40.0
"""Of the other backends, that start a sandbox in milliseconds."""


class StartRate:
    """A bucket of starts that fills at a constant rate; who finds it empty is refused at once.

    Args:
        per_s: Starts a second.
        burst: How many may follow one another at once; by default those of two seconds, at least 8.
    """

    def __init__(self, per_s: float, burst: float = 0.0):
        assert per_s > 0
        self.per_s, self.burst = per_s, burst or max(2 * per_s, 8.0)
        self._left, self._filled_s = self.burst, 0.0

    def take(self, now_s: float, starts: int = 1) -> None:
        """Takes starts out, at a time that does not run backwards.

        A group that is larger than the bucket may go when that is full, and is paid off afterwards.

        Raises:
            RefusedError: There are too few (`start_rate`).
        """
        self._left = min(self.burst, self._left + (now_s - self._filled_s) * self.per_s)
        self._filled_s = now_s
        if self._left < min(starts, self.burst):
            wait = (min(starts, self.burst) - self._left) / self.per_s
            raise RefusedError(
                f"the node starts {self.per_s:g} sandboxes a second; the next can be in {wait:.1f} s",
                "start_rate",
            )
        self._left -= starts


def start_rate(backend: str, per_s: float = 0.0) -> StartRate:
    """Returns the limit of a backend: `per_s`, or for 0 what its kind bears on this machine's cores."""
    cores = os.cpu_count() or 1
    return StartRate(per_s or cores * STARTS_PER_CORE_S.get(backend, LIGHT_STARTS_PER_CORE_S))
