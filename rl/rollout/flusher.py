"""When the token log is written: as seldom as it may be, as each time costs more than what is written then.

What is appended waits for `longest` seconds at most. A timer of that period would keep to it too, but decode
steps come at a rhythm of their own: when the next step would be too late, all are written as soon as this one
is there, while it is fresh in the caches. A timer that knows the rhythm looks after the rest.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_EARLY = 1 / 8
"""By how much of `longest` the flusher is too early, so that a step that comes early too need not wake it."""
_SLOWLY = 1 / 4
"""How quickly it believes that appends come later now; that they come earlier it believes at once."""


class Pace:
    """Says how long the flusher may sleep. Times are seconds of one clock; one thread calls `sleep`.

    Whoever appends says so afterwards; whoever takes what waits says so before. The flusher expects the next
    append as long after its last flush as the one before came, and sleeps until that has waited for
    `longest`. Who appends earlier wakes it, and so does a step if the next one, as long after it as it came
    after the one before, would be too late.
    """

    def __init__(self, longest: float, now: float) -> None:
        self.oldest: float | None = None
        self._longest, self._early = longest, _EARLY * longest
        self._flushed, self._gap, self._wakes_at = now, 0.0, math.inf
        self._stepped, self._due = now, False

    def appended(self, now: float) -> bool:
        """Something was appended and waits from now on; returns whether the flusher would sleep too long."""
        if self.oldest is not None:
            return False
        self.oldest = now
        return now + self._longest < self._wakes_at

    def stepped(self, now: float) -> bool:
        """A decode step was appended; returns whether to wake the flusher."""
        late, before = self.appended(now), self._stepped
        oldest, self._stepped = self.oldest, now
        if oldest is not None and now - oldest + (now - before) > self._longest - self._early:
            self._due = late = True
        return late

    def taken(self) -> None:
        """What waits is going to be written."""
        self.oldest, self._due = None, False

    def sleep(self, now: float) -> float:
        """For how many seconds to sleep; 0 when it is time to flush."""
        oldest = self.oldest
        if oldest is None:
            if now - self._flushed >= self._longest:  # nothing came: it may take as long again
                self._gap = 2 * (now - self._flushed)
        elif self._due or now - oldest >= self._longest - 2 * self._early:
            gap = max(oldest - self._flushed, 0.0)
            self._gap, self._flushed = min(gap, self._gap + _SLOWLY * (gap - self._gap)), now
            return 0.0
        self._wakes_at = max(now, self._flushed + self._gap - self._early) + self._longest
        oldest = self.oldest  # again: who appended before this line did not see that time yet
        if oldest is not None:
            self._wakes_at = oldest + self._longest - self._early
        return max(self._wakes_at - now, 1e-6)


class Flusher:
    """A thread that calls `flush` at the pace of what is appended, until `close` or an error of that."""

    def __init__(self, flush: Callable[[], object], longest: float, expected: type[Exception]) -> None:
        self._flush, self._expected = flush, expected
        self._pace = Pace(longest, time.monotonic())
        self.taken = self._pace.taken
        self._asleep = threading.Lock()  # whoever releases it wakes the thread
        self._asleep.acquire()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="token-log", daemon=True)
        self._thread.start()

    def appended(self) -> None:
        """Something was appended."""
        pace = self._pace
        if pace.oldest is None and pace.appended(time.monotonic()):
            self._wake()

    def stepped(self) -> None:
        """A decode step was appended."""
        if self._pace.stepped(time.monotonic()):
            self._wake()

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # another one was quicker
            self._asleep.release()

    def _run(self) -> None:
        while not self._closed:
            if seconds := self._pace.sleep(time.monotonic()):
                self._asleep.acquire(True, seconds)
                continue
            try:
                self._flush()
            except self._expected:
                return
