"""Warm pools: sandboxes that are started ahead and wait, paused, until somebody claims them.

What Docker takes for a start (a third of a second, and six a second on two cores however many ask) is paid
before anybody waits for it. Pools are filled in the background, below the rate of the backend and only while
no create waits for its start; they count in admission, and give way to a create that finds no room. A claim
is whole: as many as are asked for, resumed at once, or none of them.

The operator keeps pools for the node's life; an owner's hint (`Fleet.warm`) adds to them while it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sandbox.box import Box
from sandbox.errors import PolicyError, RefusedError, SandboxError
from sandbox.layers.compose import pinned
from sandbox.limiter import StartRate, start_rate
from sandbox.shares import Share, check
from sandbox.types import SandboxSpec
from sandbox.warm_spec import pool_id, size

if TYPE_CHECKING:
    from sandbox.node import Node

OPERATOR = ""
"""Whose pools stay for the life of the node."""

_LOOK_S, _REST_S, _BACK_OFF_S, _TRIES = 0.25, 1.0, 30.0, 3
_LOG = logging.getLogger("sandbox.node")


@dataclass(slots=True)
class WarmPool:
    """The sandboxes of one specification that wait, and who wants how many to."""

    id: str
    backend: str
    spec: SandboxSpec
    wanted: dict[str, int] = field(default_factory=dict[str, int])
    ready: deque[Box] = field(default_factory=deque[Box])
    starting: int = 0
    claimed: int = 0
    failures: int = 0
    rest_until: float = 0.0
    rested: float = 0.0
    problem: str = ""

    @property
    def target(self) -> int:
        """How many are to be ready."""
        return sum(self.wanted.values())

    @property
    def short(self) -> int:
        """How many are missing."""
        return self.target - len(self.ready) - self.starting

    def rest(self, now: float) -> None:
        """Puts the filling off for a moment, one in four: who claims has work to do right away."""
        if now > self.rested + 4 * _REST_S:
            self.rested, self.rest_until = now, max(self.rest_until, now + _REST_S)

    def about(self) -> dict[str, Any]:
        """Returns what an operator is told."""
        return {
            "pool": self.id, "backend": self.backend, "target": self.target, "ready": len(self.ready),
            "starting": self.starting, "claimed": self.claimed, "problem": self.problem,
        }  # fmt: skip


class WarmPools:
    """The pools of one node."""

    def __init__(self, node: Node):
        self._node = node
        self._pools: dict[str, WarmPool] = {}
        self._leaving: list[Box] = []
        self._rates: dict[str, StartRate] = {}
        self._changed = asyncio.Event()
        self._fills: set[asyncio.Task[None]] = set()
        self.held_back = False

    def boxes(self) -> Iterator[Box]:
        """Yields what waits, and what is on its way to an owner."""
        for pool in self._pools.values():
            yield from pool.ready
        yield from self._leaving

    def counts(self) -> dict[str, int]:
        """Returns how many are ready, by pool."""
        return {pool.id: len(pool.ready) for pool in self._pools.values()}

    def ready(self, backend: str, spec: SandboxSpec) -> int:
        """Returns how many of a specification are ready."""
        return self.counts().get(pool_id(backend, pinned(self._node.state_dir, spec)), 0)

    def about(self) -> list[dict[str, Any]]:
        """Returns what an operator is told of the pools."""
        return [pool.about() for pool in self._pools.values()]

    def hints(self) -> Iterator[tuple[str, SandboxSpec]]:
        """Yields what is kept warm on behalf of owners: it counts in their quotas."""
        for pool in self._pools.values():
            for owner, count in pool.wanted.items():
                if owner != OPERATOR:
                    yield from [(owner, pool.spec)] * count

    async def want(
        self, owner: str, backend: str, spec: SandboxSpec, count: int, shares: Sequence[Share] = ()
    ) -> WarmPool:
        """Has `count` of a specification kept ready on behalf of an owner, or of the operator (0: no more).

        Raises:
            PolicyError: The node will never have them.
            RefusedError: The project's quota would be passed.
            BackendMissingError: It has no such backend.
        """
        if count:
            size(count, "warm")
        backend = (await self._node.pick(backend)).name
        if count > self._node.limits.sandboxes:
            raise PolicyError(
                f"the node holds {self._node.limits.sandboxes} sandboxes, not {count} warm ones"
            )
        spec = pinned(self._node.state_dir, spec)  # a name that moves leads to another pool
        name = pool_id(backend, spec)
        before = self._pools[name].wanted.get(owner, 0) if name in self._pools else 0
        if count > before:
            check(shares, spec, count - before, self._node.held())
        pool = self._pools.setdefault(name, WarmPool(name, backend, spec))
        pool.wanted[owner] = count
        pool.wanted = {who: number for who, number in pool.wanted.items() if number}
        pool.rest_until, pool.failures = 0.0, 0
        self._trim(pool)
        self._changed.set()
        return pool

    def forget(self, owner: str) -> None:
        """Drops what an owner wanted who has gone."""
        for pool in list(self._pools.values()):
            if pool.wanted.pop(owner, 0):
                self._trim(pool)

    def keep(self, names: Collection[str]) -> None:
        """Drops what the operator wanted of pools with other names."""
        for pool in [pool for pool in self._pools.values() if pool.id not in names]:
            if pool.wanted.pop(OPERATOR, 0):
                self._trim(pool)

    def _trim(self, pool: WarmPool) -> None:
        while len(pool.ready) > (0 if self.held_back else pool.target):
            self._node.end(pool.ready.pop())
        if not pool.target and not pool.starting:
            self._pools.pop(pool.id, None)

    def hold_back(self, on: bool) -> None:
        """Ends what waits and fills no more (the node drains), or begins to fill again."""
        self.held_back = on
        for pool in list(self._pools.values()):
            self._trim(pool)
        self._changed.set()

    def give_way(self) -> bool:
        """Ends one that waits, of the pool with the most; returns whether there was any."""
        pool = max(self._pools.values(), key=lambda pool: len(pool.ready), default=None)
        if pool is None or not pool.ready:
            return False
        self._node.end(pool.ready.pop())
        pool.rest_until = time.monotonic() + _BACK_OFF_S
        pool.problem = "gave way to creates that found no room"
        return True

    async def claim(
        self, owner: str, backend: str, spec: SandboxSpec, keys: Sequence[str], shares: Sequence[Share] = ()
    ) -> list[Box] | None:
        """Gives as many sandboxes as there are keys to an owner; None if too few wait. An empty key is none.

        Raises:
            RefusedError: The project's quota would be passed.
            LostError: The owner has gone meanwhile.
        """
        name = pool_id(backend, pinned(self._node.state_dir, spec)) if self._pools else ""
        pool = self._pools.get(name)
        for _ in range(_TRIES):
            if pool is None or len(pool.ready) < len(keys):
                return None
            check(shares, spec, len(keys), self._node.held())
            boxes = [pool.ready.popleft() for _ in keys]
            for box in boxes:
                box.owner = owner
            self._leaving.extend(boxes)
            try:
                await self._node.births.hand_over(boxes, owner, keys)
                pool.claimed += len(boxes)
                pool.rest(time.monotonic())
                return boxes
            except SandboxError as error:
                if owner not in self._node.tenants:
                    raise
                _LOG.warning("%d warm sandboxes were ended, one could not be resumed: %s", len(boxes), error)
            finally:
                self._leaving = [box for box in self._leaving if box not in boxes]
                self._changed.set()
        return None

    async def tend(self) -> None:
        """Fills the pools, and replaces what has died in them."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_S)
            self._changed.clear()
            for pool in list(self._pools.values()):
                self._prune(pool)
            self._fill()

    def _prune(self, pool: WarmPool) -> None:
        for box in [box for box in pool.ready if box.resident.fault is not None]:
            _LOG.warning("warm sandbox %s died: %s", box.id, box.resident.fault)
            pool.ready.remove(box)
            self._node.end(box)

    def _fill(self) -> None:
        most = max(min(self._node.limits.starts_at_once // 2, (os.cpu_count() or 1) // 2), 1)
        while not self.held_back and len(self._fills) < most and not self._creates_wait():
            now = time.monotonic()
            short = [pool for pool in self._pools.values() if pool.short > 0 and now >= pool.rest_until]
            if not short:
                return
            pool = max(short, key=lambda pool: pool.short)
            rate = self._rates.setdefault(pool.backend, start_rate(pool.backend))
            try:
                rate.take(now)
            except RefusedError:
                return
            pool.starting += 1
            task = asyncio.create_task(self._start(pool))
            self._fills.add(task)
            task.add_done_callback(self._fills.discard)

    def _creates_wait(self) -> bool:
        creates = sum(bool(owner) for owner, _ in self._node.births.starting.values())
        return creates + len(self._fills) >= self._node.limits.starts_at_once

    async def _start(self, pool: WarmPool) -> None:
        try:
            box = await self._node.births.warm(pool.id, pool.backend, pool.spec)
            pool.ready.append(box)
            pool.failures, pool.problem = 0, ""
        except SandboxError as error:
            pool.failures += 1
            pool.problem = str(error)
            pool.rest_until = time.monotonic() + min(_BACK_OFF_S, 0.5 * 2 ** min(pool.failures, 10))
            _LOG.warning("a sandbox of the warm pool %s did not start: %s", pool.id, error)
        finally:
            pool.starting -= 1
            self._trim(pool)
            self._changed.set()

    async def end(self) -> None:
        """Ends the pools; the node ends."""
        self.hold_back(True)
        await asyncio.gather(*self._fills, return_exceptions=True)
        self.hold_back(True)
