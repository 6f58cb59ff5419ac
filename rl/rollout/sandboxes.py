"""Where a worker gets its sandboxes: a shared pool for stateless tools, else one box a trajectory.

Both survive what holds them. A node that was killed is started again and a pool is made anew. A trajectory's
own box outlives the process that uses it: whoever goes on with the sample attaches to it, and what was done
in it is answered from its journal; when it is gone with its node it is made anew, in its next generation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from envs.agents import inside
from envs.base import Environment
from rl.rollout.config import UnknownCommands
from rl.rollout.state import SandboxPlace
from sandbox.base import Sandbox
from sandbox.client import Fleet
from sandbox.errors import JournalError, LostError, SandboxError, UnknownOutcomeError
from sandbox.pool import Pool
from sandbox.recovery import Decision
from sandbox.remote import RemoteBox
from sandbox.types import SandboxSpec

_END_NOW_S, _ENDED_S, _LOOK_S = 1e-3, 30.0, 0.1


def stateless(env: Environment) -> bool:
    """Whether every tool call may run in any box: nothing is kept there, and no agent program runs there."""
    if env.sandbox is None:
        return True
    agent_inside = inside(getattr(env, "agent", None))
    return not agent_inside and bool(env.tools) and all(tool.stateless for tool in env.tools)


class OwnSandbox(Protocol):
    """A trajectory's own sandbox; `open` comes first.

    `rebuilt` says that it began empty, without its journal: what was done in it before runs again. With
    `keep` it stays when its use ends, for whoever goes on with the sample.
    """

    rebuilt: bool
    keep: bool

    @property
    def box(self) -> Sandbox | None:
        """The sandbox, once it was opened."""
        ...

    @property
    def place(self) -> SandboxPlace:
        """Where it stands."""
        ...

    async def open(self, error: SandboxError | None = None) -> Sandbox:
        """Gets the sandbox, also again after `error`; its caller gives all commands anew, in order.

        Raises:
            SandboxError: It is not to be had, or the error is none after which one may go on.
        """
        ...


class Sandboxes(Protocol):
    """Lends sandboxes; every box goes back however its use ends."""

    counts: Counter[str]

    def shared(self) -> AbstractAsyncContextManager[Sandbox]:
        """A box for one call of a stateless tool."""
        ...

    def own(
        self, session: str, place: SandboxPlace | None = None, *, lasting: bool = True
    ) -> AbstractAsyncContextManager[OwnSandbox]:
        """A box for one trajectory: that of `place` where the sample has one, otherwise a new one.

        With `lasting` it is found again under `session` by whoever starts the same sample over.
        """
        ...

    async def park(self) -> None:
        """Ends the boxes that were kept; their journals stay, from which they can be made anew."""
        ...

    async def discard(self, place: SandboxPlace) -> None:
        """Deletes the box of a sample that nobody goes on with."""
        ...


@dataclass(slots=True)
class LastingFleet:
    """A connection to a fleet that is made anew when its node was killed.

    `connect` makes it; `connected` hears of every new one.
    """

    connect: Callable[[], Awaitable[Fleet]]
    connected: Callable[[Fleet], None] = lambda fleet: None
    reconnects: int = 0
    _fleet: Fleet | None = field(init=False, default=None)
    _connecting: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    async def get(self) -> Fleet:
        """Returns a connection that holds as far as is known."""
        async with self._connecting:
            if self._fleet is not None and self._fleet.lost:
                lost, self._fleet = self._fleet, None
                self.reconnects += 1
                await lost.close(release=False)
            if self._fleet is None:
                self._fleet = await self.connect()
                self.connected(self._fleet)
            return self._fleet

    async def close(self, *, release: bool) -> None:
        """Disconnects; with `release` the owner's sandboxes end now, also those of a node that came back."""
        if self._fleet is not None:
            fleet = await self.get() if release else self._fleet
            await fleet.close(release=release)


def lasting(fleet: Fleet) -> LastingFleet:
    """Returns a connection that its owner opened and closes; when its node is lost it stays so."""

    async def connect() -> Fleet:
        return fleet

    return LastingFleet(connect)


@dataclass(slots=True)
class FleetSandboxes:
    """Sandboxes of one specification from a fleet.

    `lease_s` outlives a trajectory's deadline, so that no box dies under a living episode. `unknown` says
    what becomes of a command that was under way when its caller died. A pool of the same `pool_key` is taken
    over from a process that died.

    `counts` has attached (boxes of an earlier process), fast_forwarded (commands answered by a journal),
    renewed (boxes made anew from a journal), replayed (commands that ran again for it), rebuilt (boxes
    made anew without a journal), and unknown (commands that were under way).
    """

    fleet: LastingFleet
    spec: SandboxSpec
    pool_size: int
    lease_s: float
    unknown: UnknownCommands = "replay"
    pool_key: str = ""
    counts: Counter[str] = field(init=False, default_factory=Counter)
    _pool: tuple[Fleet, Pool] | None = field(init=False, default=None)
    _making: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _kept: list[RemoteBox] = field(init=False, default_factory=list)

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[Sandbox]:
        """A box of the pool, which is made at the first call, and again when its node was killed."""
        async with self._making:
            fleet = await self.fleet.get()
            if self._pool is None or self._pool[0] is not fleet:
                self._pool = fleet, await fleet.pool(self.spec, self.pool_size, key=self.pool_key)
            pool = self._pool[1]
        async with pool.borrow() as box:
            yield box

    @asynccontextmanager
    async def own(
        self, session: str, place: SandboxPlace | None = None, *, lasting: bool = True
    ) -> AsyncIterator[OwnSandbox]:
        """A box of the sample's own, labelled with the session; a cancelled opening is undone."""
        labels = {**self.spec.labels, "session": session}
        spec = replace(self.spec, labels=labels, ttl_s=self.lease_s, journal=True)
        own = FleetBox(self, session if lasting else "", spec, place)
        try:
            yield own
        finally:
            if own.keep and own.box is not None:
                self._kept.append(own.box)
            elif not own.keep:
                await asyncio.shield(own.close())

    async def park(self) -> None:
        """Ends the boxes that were kept; their journals stay, from which they can be made anew."""
        kept, self._kept = self._kept, []
        await asyncio.gather(*(box.extend(_END_NOW_S) for box in kept), return_exceptions=True)

    async def discard(self, place: SandboxPlace) -> None:
        """Deletes the box of a sample that nobody goes on with."""
        with suppress(LostError):
            await (await self.fleet.get()).discard(place.sandbox)


class FleetBox:
    """Implements `OwnSandbox` on a fleet, for the sample that stands at `place`, if anywhere."""

    def __init__(
        self, sandboxes: FleetSandboxes, key: str, spec: SandboxSpec, place: SandboxPlace | None
    ) -> None:
        self._sandboxes, self._key, self._spec = sandboxes, key, spec
        self._id, self._generation = (place.sandbox, place.generation) if place else ("", 0)
        self._fresh = self.rebuilt = self.keep = False
        self.box: RemoteBox | None = None

    @property
    def place(self) -> SandboxPlace:
        """Where it stands."""
        assert self.box is not None, "open comes first"
        return SandboxPlace(self.box.id, self.box.generation, self.box.position)

    async def open(self, error: SandboxError | None = None) -> RemoteBox:
        """Attaches to the box, or makes one; after `error` anew where a command's outcome is not known."""
        if isinstance(error, UnknownOutcomeError):
            await self._settle(error)
        opening = asyncio.ensure_future(self._open())
        try:
            box = await asyncio.shield(opening)
        except asyncio.CancelledError:
            (found,) = await asyncio.gather(opening, return_exceptions=True)
            if not isinstance(found, BaseException):
                self.box = found
            raise
        self.box = box
        return box

    async def close(self) -> None:
        """Ends the box with its journal, whether it was opened here or by an earlier process."""
        if self._id:
            fleet = await self._sandboxes.fleet.get()
            with suppress(LostError):
                await fleet.discard(self._id)

    async def _open(self) -> RemoteBox:
        fleet = await self._sandboxes.fleet.get()
        if not self._id:
            made = await fleet.create(self._spec, key=self._key)
            self._id, self._generation = made.id, made.generation
        return await self._attach(fleet)

    async def _attach(self, fleet: Fleet) -> RemoteBox:
        """Gets the box with its past; without a journal another one takes its place."""
        counts = self._sandboxes.counts
        try:
            box = await fleet.attach(self._id, unknown="ask", ask=self._ask, replay=True)
        except (LostError, JournalError):
            if fleet.lost:
                raise
            await fleet.discard(self._id)
            box = await fleet.create(self._spec)
            self._id, self._generation, self._fresh, self.rebuilt = box.id, box.generation, True, True
            counts["rebuilt"] += 1
            return box
        self._fresh, self._generation = box.generation > self._generation, box.generation
        self.rebuilt = False
        counts["attached"] += bool(box.recorded)
        counts["fast_forwarded"] += box.recorded
        counts["renewed"] += self._fresh
        counts["replayed"] += box.replayed
        return box

    async def _ask(self, number: int, error: UnknownOutcomeError) -> Decision:
        """In a generation that was made after the command was under way, it has never run."""
        self._sandboxes.counts["unknown"] += 1
        idempotent = self._sandboxes.unknown != "fail" and error.reason == "idempotent"
        return "rerun" if self._fresh or idempotent else "fail"

    async def _settle(self, error: UnknownOutcomeError) -> None:
        if error.reason == "running":  # for a caller that has just died, and is being cancelled
            await asyncio.sleep(_LOOK_S)
        elif self._sandboxes.unknown == "replay":
            await self._end()
        else:
            raise error

    async def _end(self) -> None:
        """Ends the living box and waits until it is gone; its journal stays."""
        fleet = await self._sandboxes.fleet.get()
        assert self.box is not None
        await self.box.extend(_END_NOW_S)
        async with asyncio.timeout(_ENDED_S):
            while self._id in [box.id for box in await fleet.boxes()]:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(_LOOK_S)
