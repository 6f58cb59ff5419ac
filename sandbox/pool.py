"""Sandboxes that serve the stateless calls of many trajectories."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from sandbox.errors import FileError, PolicyError, RefusedError, SandboxError
from sandbox.types import SandboxSpec

if TYPE_CHECKING:
    from sandbox.client import Fleet
    from sandbox.remote import RemoteBox

_LOG = logging.getLogger("sandbox.pool")
_HARMLESS = (FileError, PolicyError, RefusedError)
"""Errors after which the sandbox is as good as before."""


class Pool:
    """Lends the sandbox with the fewest calls; one that died is replaced. Made by `Fleet.pool`."""

    def __init__(self, fleet: Fleet, spec: SandboxSpec, boxes: list[RemoteBox]):
        self._fleet, self._spec, self._boxes = fleet, spec, boxes
        self._calls = [0] * len(boxes)
        self._turn = 0
        self._replacing = asyncio.Lock()
        self.replaced = 0

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncGenerator[RemoteBox]:
        """Lends a sandbox; a call that finds it dead fails as infrastructure, and the next gets a new one."""
        size = len(self._boxes)
        self._turn += 1
        place = min(range(size), key=lambda n: (self._calls[n], (n - self._turn) % size))
        box = self._boxes[place]
        self._calls[place] += 1
        try:
            yield box
        except _HARMLESS:
            raise
        except SandboxError:
            await self._replace(place, box)
            raise
        finally:
            self._calls[place] -= 1

    async def _replace(self, place: int, box: RemoteBox) -> None:
        async with self._replacing:
            if self._boxes[place] is not box:
                return
            try:
                await box.close()
                self._boxes[place] = await self._fleet.create(self._spec)
                self.replaced += 1
            except SandboxError as error:
                _LOG.warning("a sandbox of the pool could not be replaced yet: %s", error)

    async def close(self) -> None:
        """Ends the pool's sandboxes."""
        await asyncio.gather(*(box.close() for box in self._boxes))
