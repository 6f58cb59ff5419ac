"""Taking turns: those who ask for the same thing wait for each other; nothing is kept of who is through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager


class Turns:
    """One lock for each thing that somebody wants right now."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, list[None]]] = {}

    @asynccontextmanager
    async def of(self, *what: Hashable) -> AsyncGenerator[None]:
        """Runs its body alone among those who name the same thing."""
        lock, users = self._locks.setdefault(what, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                del self._locks[what]
