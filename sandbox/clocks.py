"""Deadlines that stand still while a sandbox is paused."""

from __future__ import annotations

import asyncio
from typing import Any


class Clocks:
    """The deadlines of what is asked of one sandbox."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends: dict[asyncio.Future[Any], float] = {}
        self._calls: dict[asyncio.Future[Any], asyncio.TimerHandle] = {}
        self._held_at: float | None = None

    @property
    def held(self) -> bool:
        """Whether they stand still."""
        return self._held_at is not None

    def start(self, reply: asyncio.Future[Any], seconds: float) -> None:
        """Has `reply` end with TimeoutError unless it comes within `seconds`, pauses not counted."""
        if self._held_at is None:
            self._ends[reply] = self._loop.time() + seconds
            self._call(reply)
        else:
            self._ends[reply] = self._held_at + seconds

    def stop(self, reply: asyncio.Future[Any]) -> None:
        """Forgets a deadline."""
        del self._ends[reply]
        if (call := self._calls.pop(reply, None)) is not None:
            call.cancel()

    def hold(self) -> None:
        """Stops them."""
        self._held_at = self._loop.time()
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()

    def go_on(self) -> None:
        """Moves them by the time that they stood still."""
        assert self._held_at is not None
        held_s, self._held_at = self._loop.time() - self._held_at, None
        for reply in self._ends:
            self._ends[reply] += held_s
            self._call(reply)

    def _call(self, reply: asyncio.Future[Any]) -> None:
        self._calls[reply] = self._loop.call_at(self._ends[reply], _expire, reply)


def _expire(reply: asyncio.Future[Any]) -> None:
    if not reply.done():
        reply.set_exception(TimeoutError())
