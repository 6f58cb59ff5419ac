"""How often processes of a run may die: a crash that repeats without progress ends the run."""

from __future__ import annotations

from collections import Counter


class ProcessDiedError(RuntimeError):
    """A process of the run ended while it was needed; `role` names it."""

    def __init__(self, role: str, why: str) -> None:
        super().__init__(f"the {role} died ({why})")
        self.role = role


class RestartsExhaustedError(RuntimeError):
    """A process died again and again without progress: which, how often, and what to look at."""


class Restarts:
    """Counts the deaths of each process since its last progress; at most `limit` are made good."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._deaths: Counter[str] = Counter()
        self.total = 0

    def progress(self, role: str) -> None:
        """Notes that a process did something useful: its deaths so far are forgiven."""
        self._deaths.pop(role, None)

    def spend(self, role: str, death: BaseException) -> None:
        """Counts a death. Raises RestartsExhaustedError when there were too many in a row."""
        self._deaths[role] += 1
        if self._deaths[role] > self._limit:
            raise RestartsExhaustedError(
                f"the {role} died {self._deaths[role]} times without progress between ({death}); its log "
                "says why. launcher.restarts sets how many deaths are made good; what was sampled is safe: "
                "resume the run when the cause is gone"
            ) from death
        self.total += 1
