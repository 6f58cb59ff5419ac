"""Slow tools for experiments: seconds added to every tool call, the same for every schedule of a run.

This simulates tools that take long, such as test suites or web pages, around whatever the environment does.
It is off unless a run asks for it. The k-th call that a task makes at one place of its episode waits the
same time in every run, so that runs which differ only in how they schedule can be compared.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field


class LatencyError(ValueError):
    """A latency that cannot be: which setting, and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Exponential waits of mean `mean_s` seconds; the share `slow_share` of calls takes `slow_s` instead."""

    mean_s: float = 0.2
    slow_share: float = 0.0
    slow_s: float = 5.0

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            LatencyError: A field is out of range.
        """
        for name in ("mean_s", "slow_s"):
            if not 0 <= getattr(self, name) < 3600:
                raise LatencyError(f"env.latency.{name}={getattr(self, name)}: set it from 0 to 3600 seconds")
        if not 0 <= self.slow_share <= 1:
            raise LatencyError(f"env.latency.slow_share={self.slow_share}: set it to a share, from 0 to 1")


@dataclass(slots=True)
class Delays:
    """Draws the waits of one generator."""

    latency: Latency
    seed: int
    _calls: Counter[str] = field(default_factory=Counter)

    def seconds(self, task: str, number: int) -> float:
        """Returns how long the next call is to wait: call `number` (0-based) of an episode of `task`."""
        place = f"{task}/{number}"
        self._calls[place] += 1
        text = f"{self.seed}/{place}/{self._calls[place]}".encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        slow, size = (int.from_bytes(part, "little") / 2**64 for part in (digest[:8], digest[8:]))
        if slow < self.latency.slow_share:
            return self.latency.slow_s
        return -self.latency.mean_s * math.log(1.0 - size) if size < 1 else 0.0
