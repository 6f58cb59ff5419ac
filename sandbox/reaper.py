"""The reaper: looks every few seconds for what backends have under this node's name and nobody holds.

A sandbox is held when the lease file says so, and on its way while the node starts it or undoes that. All
else that carries the node's labels, or lies in its control groups, has been left by something that went
wrong, and is removed: looked up by label, never by name, and asked about only after it was seen, so that a
create which begins meanwhile is not among it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

from sandbox.backends.cgroups import own_groups, remove_groups
from sandbox.errors import SandboxError

if TYPE_CHECKING:
    from sandbox.node import Node

PERIOD_S = 10.0
_KEPT = 20
_LOG = logging.getLogger("sandbox.node")


class Reaper:
    """Removes what nobody holds."""

    def __init__(self, node: Node, period_s: float = PERIOD_S):
        self._node, self._period_s = node, period_s
        self._ran, self._runs, self._removed = time.monotonic(), 0, 0
        self._last: deque[str] = deque(maxlen=_KEPT)
        self._problem = ""

    def held(self) -> frozenset[str]:
        """Returns the names of what must stay, as of now."""
        leased = {lease.name for lease in self._node.leases.live.values()}
        births = self._node.births
        unborn = {box.name for box in births.unborn}
        coming = {*births.ahead, *births.starting, *births.undoing}
        return frozenset({*leased, *unborn, *coming, *self._node.fading})

    async def tend(self) -> None:
        """Looks every period."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.run()

    async def run(self) -> list[str]:
        """Looks once; returns the names of what it removed."""
        found: list[str] = []
        self._problem = ""
        looks = {name: backend.reap for name, backend in self._node.backends.items()}
        for name, look in {**looks, "control groups": _reap_groups}.items():
            try:
                found += await look(self.held)
            except (SandboxError, OSError) as error:
                self._problem = f"{name}: {error}"
                _LOG.warning("the reaper could not look at %s", self._problem)
        self._ran, self._runs, self._removed = time.monotonic(), self._runs + 1, self._removed + len(found)
        self._last.extend(found)
        if found:
            _LOG.warning("the reaper removed what nobody held: %s", ", ".join(found))
        return found

    def about(self) -> dict[str, Any]:
        """Returns what an operator is told: its period, how long ago it looked, what it found of late."""
        return {
            "period_s": self._period_s, "age_s": round(time.monotonic() - self._ran, 3), "runs": self._runs,
            "removed": self._removed, "last": list(self._last), "problem": self._problem,
        }  # fmt: skip


async def _reap_groups(held: Callable[[], Set[str]]) -> list[str]:
    """Ends what runs in this node's control groups that are not held, and removes them."""
    stray = {name: folders for name, folders in own_groups().items() if name not in held()}
    for folders in stray.values():
        await asyncio.to_thread(remove_groups, folders)
    return sorted(stray)
