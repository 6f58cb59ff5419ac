"""Where a worker gets its sandboxes: a shared pool for stateless tools, else one box a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from sandbox.base import Sandbox
from sandbox.types import SandboxSpec


class Pool(Protocol):
    """Boxes that serve one call at a time, each call in a fresh fork."""

    def borrow(self) -> AbstractAsyncContextManager[Sandbox]:
        """Lends a box."""
        ...


class Fleet(Protocol):
    """What is used of `sandbox.Fleet`."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Creates one box."""
        ...

    async def pool(self, spec: SandboxSpec, size: int) -> Pool:
        """Creates a pool of boxes."""
        ...


class Sandboxes(Protocol):
    """Lends sandboxes; every box goes back however its use ends."""

    def shared(self) -> AbstractAsyncContextManager[Sandbox]:
        """A box for one call of a stateless tool."""
        ...

    def own(self, session: str) -> AbstractAsyncContextManager[Sandbox]:
        """A box for one trajectory."""
        ...


@dataclass(slots=True)
class FleetSandboxes:
    """Sandboxes of one specification from a fleet. The fleet stays its owner's to close.

    `lease_s` outlives a trajectory's deadline, so that no box dies under a living episode.
    """

    fleet: Fleet
    spec: SandboxSpec
    pool_size: int
    lease_s: float
    _pool: Pool | None = field(init=False, default=None)
    _making: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[Sandbox]:
        """A box of the pool, which is made at the first call."""
        async with self._making:
            if self._pool is None:
                self._pool = await self.fleet.pool(self.spec, self.pool_size)
        async with self._pool.borrow() as box:
            yield box

    @asynccontextmanager
    async def own(self, session: str) -> AsyncIterator[Sandbox]:
        """A new box, labelled with the session; a cancelled creation is finished and undone."""
        labels = {**self.spec.labels, "session": session}
        creating = asyncio.ensure_future(
            self.fleet.create(replace(self.spec, labels=labels, ttl_s=self.lease_s))
        )
        try:
            box = await asyncio.shield(creating)
        except asyncio.CancelledError:
            await (await creating).close()
            raise
        try:
            yield box
        finally:
            await asyncio.shield(box.close())
