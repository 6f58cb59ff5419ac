"""Stops dispatching into an environment that only fails, so that an outage does not burn the retry budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class CircuitBreaker:
    """Opens after `failures` failures in a row; after `rest_s` seconds one sample may probe the environment.

    The clock is the caller's (`now`, seconds), which keeps the class pure.
    """

    failures: int
    rest_s: float
    in_a_row: int = 0
    opened_at: float | None = None
    probing: bool = False
    times_opened: int = 0

    @property
    def is_open(self) -> bool:
        """Whether ordinary samples are held back."""
        return self.opened_at is not None

    def may_start(self, now: float) -> bool:
        """Whether a sample may start at `now`: always when closed, one probe after the rest when open."""
        if self.opened_at is None:
            return True
        return not self.probing and now - self.opened_at >= self.rest_s

    def started(self) -> bool:
        """Notes a start that `may_start` allowed; returns whether it is a probe (half-open)."""
        self.probing = self.is_open
        return self.probing

    def succeeded(self) -> bool:
        """Closes the breaker; returns whether it was open."""
        was_open = self.is_open
        self.in_a_row, self.opened_at, self.probing = 0, None, False
        return was_open

    def failed(self, now: float) -> bool:
        """Counts a failure; a failed probe, or one failure too many, opens it at `now`, which is returned."""
        self.in_a_row += 1
        opens = self.probing or (self.opened_at is None and self.in_a_row >= self.failures)
        if opens:
            self.opened_at, self.probing = now, False
            self.times_opened += 1
        return opens

    def state_dict(self) -> dict[str, Any]:
        """Counters as JSON; a resumed run starts with the breaker closed, as its clock is a new one."""
        return {"in_a_row": 0 if self.is_open else self.in_a_row, "times_opened": self.times_opened}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.in_a_row, self.times_opened = state["in_a_row"], state["times_opened"]
        self.opened_at, self.probing = None, False
