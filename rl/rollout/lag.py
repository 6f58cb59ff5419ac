"""Notices when something blocks the event loop, and who: one blocking call holds up every sample at once.

A task beats in the loop and measures how late each beat is. A thread watches the beat; when it stays away for
`alarm_s`, the thread looks at the loop's stack and names the environment (or the file) that does not return.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import FrameType

_BEAT_S = 0.02


@dataclass(frozen=True, slots=True)
class Blocked:
    """The loop did not run for at least `seconds`; `environment` is empty when no environment's code ran."""

    environment: str
    where: str
    seconds: float


class LagMonitor:
    """Measures the lag of the running event loop between `start` and `stop`.

    `blocked` holds the newest alarms, at most one for each time the loop was held up.
    """

    def __init__(self, alarm_s: float) -> None:
        self._alarm_s = alarm_s
        self._lags: deque[float] = deque(maxlen=1024)
        self.blocked: deque[Blocked] = deque(maxlen=32)
        self._beat = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to measure the loop that calls it."""
        loop_thread = threading.get_ident()
        self._beat = time.monotonic()
        self._task = asyncio.get_running_loop().create_task(self._beats())
        self._thread = threading.Thread(target=self._watch, args=(loop_thread,), name="loop-lag", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Ends the measurement. A second call does nothing."""
        self._ended.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def stats(self) -> dict[str, float]:
        """Quantiles of the last beats' lag in seconds, and the alarms kept."""
        lags = sorted(self._lags) or [0.0]
        return {
            "loop_lag.p50": lags[len(lags) // 2],
            "loop_lag.p99": lags[min(len(lags) - 1, int(len(lags) * 0.99))],
            "loop_lag.max": lags[-1],
            "loop_lag.alarms": float(len(self.blocked)),
        }

    async def _beats(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            self._beat = time.monotonic()
            self._lags.append(max(0.0, self._beat - before - _BEAT_S))

    def _watch(self, loop_thread: int) -> None:
        reported = 0.0
        while not self._ended.wait(self._alarm_s / 4):
            beat, late = self._beat, time.monotonic() - self._beat
            if late >= self._alarm_s and beat != reported:
                reported = beat
                frame = sys._current_frames().get(loop_thread)
                self.blocked.append(Blocked(_environment(frame), _where(frame), late))


def _environment(frame: FrameType | None) -> str:
    """The environment whose tool the loop is running: the episode's frame below it knows."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        around = getattr(owner, "_around", None)
        if around is not None:
            return str(around.env.name)
        frame = frame.f_back
    return ""


def _where(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "unknown"
