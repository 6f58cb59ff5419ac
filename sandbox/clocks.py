"""Deadlines that stand still while a sandbox is paused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Clocks:
    """The deadlines of what is asked of one sandbox."""

    def __init__(self) -> None:
        self._ends: dict[asyncio.Timeout, float] = {}
        self._held_at: float | None = None

    @property
    def held(self) -> bool:
        """Whether they stand still."""
        return self._held_at is not None

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncGenerator[None]:
        """Raises TimeoutError when its body takes longer, pauses not counted."""
        start = asyncio.get_running_loop().time() if self._held_at is None else self._held_at
        async with asyncio.timeout_at(start + seconds if self._held_at is None else None) as deadline:
            self._ends[deadline] = start + seconds
            try:
                yield
            finally:
                del self._ends[deadline]

    def hold(self) -> None:
        """Stops them."""
        self._held_at = asyncio.get_running_loop().time()
        for deadline in self._running():
            deadline.reschedule(None)

    def go_on(self) -> None:
        """Moves them by the time that they stood still."""
        assert self._held_at is not None
        for deadline in self._running():
            self._ends[deadline] += asyncio.get_running_loop().time() - self._held_at
            deadline.reschedule(self._ends[deadline])
        self._held_at = None

    def _running(self) -> list[asyncio.Timeout]:
        return [deadline for deadline in self._ends if not deadline.expired()]
