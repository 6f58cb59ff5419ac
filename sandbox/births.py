"""How sandboxes come to be on a node: created, made anew, forked, or handed over from a warm pool.

Whole or not at all, and in the lease file before their owner hears of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator, Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sandbox.admission import admit
from sandbox.backends.base import Started
from sandbox.box import Box
from sandbox.egress import gate
from sandbox.errors import InfrastructureError, LostError, RefusedError, SandboxError, StartTimeoutError
from sandbox.journal import Journal
from sandbox.leases import Lease
from sandbox.recovery import Recorder, Replay
from sandbox.session import spec_from
from sandbox.shares import Share, check
from sandbox.snapshots import load
from sandbox.turns import Turns
from sandbox.types import Limits, SandboxSpec
from sandbox.warm_spec import size

if TYPE_CHECKING:
    from sandbox.node import Node

NODE, BOOT, POOL = "tempering.node", "tempering.boot", "tempering.pool"
"""Labels of all that a backend starts: the node's state folder, its run, and the warm pool, if any."""

_START_TIMEOUT_S, _LOOK_S = 60.0, 0.02
_AHEAD_S = 5.0
"""How long a prepared start waits for a sandbox to be asked for."""

_LOG = logging.getLogger("sandbox.node")
_FIRST: dict[str, Any] = {
    "op": "exec", "argv": ["/bin/sh", "-c", ":"], "env": {}, "cwd": "/", "timeout_s": 10.0, "limit": 1024,
}  # fmt: skip
_ROOM = frozenset({"sandboxes", "cpu", "memory", "pids"})


class Births:
    """Starts the sandboxes of one node.

    Attributes:
        starting: Those that wait for their start or are being started, by name: for whom, and what.
        unborn: Those that have started and that nobody has yet.
        undoing: Names of those whose caller went away while they were being started.
        ahead: Names of those whose start is prepared, with backend and limits; see `Backend.prepare`.
    """

    def __init__(self, node: Node):
        self._node = node
        self.starting: dict[str, tuple[str, SandboxSpec]] = {}
        self.unborn: list[Box] = []
        self.undoing: set[str] = set()
        self.ahead: dict[str, tuple[str, Limits]] = {}
        self._starts = asyncio.Semaphore(node.limits.starts_at_once)
        self.turns = Turns()

    async def create(
        self,
        owner: str,
        backend: str,
        spec: SandboxSpec,
        key: str = "",
        snapshot: str = "",
        shares: Sequence[Share] = (),
    ) -> Box:
        """Admits and starts one sandbox, or takes one from the warm pool; returns it once its agent answers.

        Args:
            owner: Whose it is.
            backend: The name of its backend.
            spec: What is asked for.
            key: Names the creation: a second one of the owner with the same key gets the same sandbox. If
                that was lost with its node, it is made anew in its next generation, from its journal.
            snapshot: From which it starts, if any.
            shares: What the owner's project may hold.

        Raises:
            RefusedError: It does not fit.
            PolicyError: The backend does not offer what the specification asks for.
            StartTimeoutError: It did not come up in time.
            InfrastructureError: It did not come up.
            LostError: The sandbox of this key was lost with its node, and had no journal.
        """
        if not key:
            return await self._create(owner, backend, spec, "", snapshot, shares)
        async with self.turns.of(owner, key):
            made = await self._known(owner, key, shares)
            return made or await self._create(owner, backend, spec, key, snapshot, shares)

    async def claim(
        self,
        owner: str,
        backend: str,
        spec: SandboxSpec,
        count: int,
        key: str = "",
        shares: Sequence[Share] = (),
        *,
        fresh: bool,
    ) -> list[Box]:
        """Gives an owner a group of sandboxes, all or none: out of the warm pool, or started for it.

        Args:
            owner: Whose they are.
            backend: The name of their backend.
            spec: What is asked for.
            count: How many.
            key: Names the claim: a second one with the same key gets the same sandboxes.
            shares: What the owner's project may hold.
            fresh: Whether they are started when the pool has too few, none of it taken.

        Raises:
            RefusedError: The pool has too few (`pool`) and `fresh` is off, or there is no room.
            LostError: Of the group of this key not all are there any more.
        """
        keys = [f"{key}/{number}" if key else "" for number in range(size(count, "claim"))]
        async with self.turns.of(owner, f"{key}/") if key else contextlib.nullcontext():
            made = [await self._known(owner, name, shares) for name in keys if name]
            if here := [box for box in made if box is not None]:
                if len(here) == count:
                    return here
                raise LostError(f"of the {count} sandboxes claimed under {key!r} {len(here)} are there")
            if taken := await self._node.warm.claim(owner, backend, spec, keys, shares):
                return taken
            if not fresh:
                ready = self._node.warm.ready(backend, spec)
                raise RefusedError(
                    f"the warm pool has {ready} of {count} sandboxes ready, and a group is taken whole: "
                    "try later, ask for fewer, or say fallback='create'",
                    "pool",
                )
            return await self._group(owner, backend, spec, keys, shares)

    async def _group(
        self, owner: str, backend: str, spec: SandboxSpec, keys: Sequence[str], shares: Sequence[Share]
    ) -> list[Box]:
        check(shares, spec, len(keys), self._node.held())
        few = asyncio.Semaphore(2 * self._node.limits.starts_at_once)

        async def one(key: str) -> Box:
            async with few:
                return await self._fresh(owner, backend, spec, key, "", shares)

        return await self._whole(owner, [one(key) for key in keys])

    async def _known(self, owner: str, key: str, shares: Sequence[Share]) -> Box | None:
        """Returns what was made for an owner under a key; what was lost with its node is made anew."""
        for box in self._node.living.values():
            if (box.owner, box.key) == (owner, key):
                return box
        if (lost := self._node.leases.by_key(owner, key)) is None:
            return None
        if not lost.journal:
            raise LostError(
                f"sandbox {lost.sandbox}, made under the key {key!r}, was lost with its node and had no "
                "journal to make it anew from: ask under another key"
            )
        return (await self.attach(owner, lost.sandbox, shares, replay=True))[0]

    async def _create(
        self, owner: str, backend: str, spec: SandboxSpec, key: str, snapshot: str, shares: Sequence[Share]
    ) -> Box:
        if snapshot:
            self._node.snapshots.get(snapshot, owner)
        elif warm := await self._node.warm.claim(owner, backend, spec, [key], shares):
            return warm[0]
        return await self._fresh(owner, backend, spec, key, snapshot, shares)

    async def _fresh(
        self, owner: str, backend: str, spec: SandboxSpec, key: str, snapshot: str, shares: Sequence[Share]
    ) -> Box:
        with self._named(backend, spec) as box_id, self._place(box_id, owner, spec, shares):
            box = await self._start(box_id, box_id, owner, backend, spec)
            box.key, box.snapshot = key, snapshot
            async with self._entering(box, fresh=True):
                if snapshot:
                    await load(box, self._node.snapshots.tree(snapshot))
                await _all(self._journal(box), self._node.leases.hold(self._lease(box)))
        return box

    async def attach(
        self, owner: str, box_id: str, shares: Sequence[Share] = (), *, replay: bool
    ) -> tuple[Box, Replay]:
        """Returns a sandbox of an owner's earlier client, and what it took to have it.

        Args:
            owner: Whose it is.
            box_id: Its id.
            shares: What the owner's project may hold, with one that is made anew.
            replay: Whether one that is gone is made anew, in its next generation, from its journal.

        Raises:
            LostError: There is none (any more), or it is gone and `replay` was not asked for.
            JournalMismatchError: Replayed, a command ended in another way.
            RefusedError: Made anew, it does not fit.
            JournalError: The journal is damaged or does not hold all commands.
        """
        async with self.turns.of(owner, f"sandbox {box_id}"):
            return await self._attach(owner, box_id, shares, replay)

    async def _attach(
        self, owner: str, box_id: str, shares: Sequence[Share], replay: bool
    ) -> tuple[Box, Replay]:
        box = self._node.living.get(box_id)
        if box is not None and box.owner == owner:
            if box.resident.fault is None:
                return box, Replay(0, ())
            await self._node.end(box)
        elif ending := self._node.ending.get(box_id):
            await asyncio.shield(ending)
        if not replay:
            raise LostError(
                f"{owner} has no living sandbox {box_id}; if its journal is there, "
                "attaching with replay=True makes it anew"
            )
        journal = await self._node.journals.reopen(box_id, owner)
        try:
            return await self._renew(owner, journal, shares)
        except BaseException:
            self._node.journals.leave(box_id)
            raise

    async def _renew(self, owner: str, journal: Journal, shares: Sequence[Share]) -> tuple[Box, Replay]:
        box_id, spec = journal.head["sandbox"], spec_from(journal.head["spec"])
        name = f"{box_id}-g{journal.generation + 1}"
        with self._place(name, owner, spec, shares):
            box = await self._start(box_id, name, owner, journal.head["backend"], spec)
            box.key, box.snapshot = journal.head["key"], journal.head["snapshot"]
            box.recorder = Recorder(journal)
            async with self._entering(box):
                latest = self._node.snapshots.latest(box_id, owner)
                base = latest.id if latest else box.snapshot
                if base:
                    self._node.snapshots.get(base, owner)
                    await load(box, self._node.snapshots.tree(base))
                replayed = await box.replay(latest.seq if latest else 0)
                journal.renew(replayed.commands)
                await self._node.leases.hold(self._lease(box))
        return box, replayed

    async def fork(self, owner: str, box_id: str, count: int, shares: Sequence[Share] = ()) -> list[Box]:
        """Starts `count` sandboxes with the files and the journal of one, all or none.

        Raises:
            RefusedError: They do not fit, or a command is running in it.
            FileError: It has files that cannot be read.
        """
        parent = self._node.box(box_id, owner)
        check(shares, parent.spec, count, self._node.held())
        async with self._node.snapshots.passing(parent) as (taken, saving):
            return await self._whole(
                owner, [self._child(parent, taken, saving, shares) for _ in range(count)]
            )

    async def _child(
        self, parent: Box, taken: str, saving: asyncio.Task[int], shares: Sequence[Share]
    ) -> Box:
        name = self._named(parent.backend, parent.spec)
        with name as box_id, self._place(box_id, parent.owner, parent.spec, shares):
            phase = parent.started.gate.phase if parent.started.gate is not None else ""
            box = await self._start(box_id, box_id, parent.owner, parent.backend, parent.spec)
            if box.started.gate is not None:
                box.started.gate.switch(phase)
            box.ttl_s, box.snapshot = parent.ttl_s, parent.snapshot
            async with self._entering(box, fresh=True):
                seq = await asyncio.shield(saving)
                await load(box, self._node.snapshots.tree(taken))
                if parent.recorder is not None:
                    past = parent.recorder.journal
                    box.background.skip(past.count("start", seq))
                    head = {**_head(box), "parent": parent.id, "parent_seq": seq}
                    box.recorder = Recorder(await self._node.journals.create(box_id, head, past, seq))
                await self._node.leases.hold(self._lease(box))
        return box

    async def _whole(self, owner: str, makings: Iterable[Coroutine[None, None, Box]]) -> list[Box]:
        tasks = [asyncio.create_task(making) for making in makings]
        gone: list[BaseException] = []
        try:
            made = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError as error:
            gone.append(error)
            for task in tasks:
                task.cancel()
            made = await asyncio.gather(*tasks, return_exceptions=True)
        boxes = [box for box in made if isinstance(box, Box)]
        for failure in (*gone, *(error for error in made if isinstance(error, BaseException))):
            await asyncio.gather(*(self._node.close_box(box.id, owner) for box in boxes))
            raise failure
        return boxes

    async def warm(self, pool: str, backend: str, spec: SandboxSpec) -> Box:
        """Starts a sandbox that nobody owns, and pauses it where its backend can."""
        with self._named(backend, spec) as box_id, self._place(box_id, "", spec):
            box = await self._start(box_id, box_id, "", backend, spec, pool)
            box.pool = pool
            self.unborn.append(box)
            try:
                await box.perform(_FIRST, b"")  # what a first command loads is loaded now
                if box.started.pause is not None:
                    await box.pause()
                await self._node.leases.hold(self._lease(box))
                if self._node.stop.is_set():
                    raise LostError("the node is about to end")
            except BaseException:
                self._node.end(box)
                raise
            finally:
                self.unborn.remove(box)
            return box

    async def hand_over(self, boxes: Sequence[Box], owner: str, keys: Sequence[str]) -> None:
        """Gives waiting sandboxes to an owner, all or none: resumed, and durably theirs.

        Raises:
            SandboxError: One of them is dead; they have all been ended.
        """
        for box, key in zip(boxes, keys, strict=True):
            box.owner, box.key, box.used = owner, key, time.monotonic()
            box.live(box.spec.life_s)
        async with self._entering(*boxes, fresh=True):
            journals, resumes = [self._journal(box) for box in boxes], [box.resume() for box in boxes]
            await _all(*resumes, *journals, self._node.leases.hold(*map(self._lease, boxes)))

    async def _journal(self, box: Box) -> None:
        if box.spec.journal:
            box.recorder = Recorder(await self._node.journals.create(box.id, _head(box)))

    def _lease(self, box: Box) -> Lease:
        tenant = self._node.tenants.get(box.owner)
        return Lease(
            box.id, box.name, box.owner, tenant.lease_s if tenant else 0.0, box.key, box.backend,
            self._node.boot, box.pool, box.spec.journal,
        )  # fmt: skip

    def _fresh_id(self) -> str:
        return f"{self._node.boot}-{secrets.token_hex(6)}"

    @contextlib.contextmanager
    def _named(self, backend: str, spec: SandboxSpec) -> Generator[str]:
        """Gives a new sandbox its name: that of a start which is prepared, if there is one of its kind."""
        kind = (backend, spec.limits) if self._node.backends[backend].prepares(spec) else None
        name = next((name for name, what in self.ahead.items() if what == kind), "")
        self.ahead.pop(name, None)
        try:
            yield name or self._fresh_id()
        except BaseException:
            if name:
                self._node.later(self._node.backends[backend].drop(name))
            raise

    async def _prepare(self, backend: str, spec: SandboxSpec) -> None:
        """Prepares a start like one that just was: more come, as a rule, and soon."""
        name, kind = self._fresh_id(), (backend, spec.limits)
        if kind in self.ahead.values():
            return
        self.ahead[name] = kind  # whoever takes it now waits for it in `start`
        try:
            await self._node.backends[backend].prepare(name, spec)
        except SandboxError as error:
            self.ahead.pop(name, None)
            _LOG.warning("no start could be prepared: %s", error)
        else:
            asyncio.get_running_loop().call_later(_AHEAD_S, self._let_go, name)

    def _let_go(self, name: str) -> None:
        if (kind := self.ahead.pop(name, None)) is not None:
            self._node.later(self._node.backends[kind[0]].drop(name))

    def end(self) -> None:
        """Undoes what was prepared; the node ends."""
        for name in [*self.ahead]:
            self._let_go(name)

    @contextlib.asynccontextmanager
    async def _entering(self, *boxes: Box, fresh: bool = False) -> AsyncGenerator[None]:
        """Makes sandboxes their owners' at the end, or ends them all; fresh ones with their journals."""
        self.unborn.extend(boxes)
        try:
            yield
            for box in boxes:
                self._node.living[box.id] = box
                if box.owner not in self._node.tenants:
                    raise LostError(f"the lease of {box.owner} ended while the sandbox was being started")
        except BaseException:
            for box in boxes:
                ending = self._node.end(box)
                if fresh:
                    self._node.later(self._forget(box, ending))
            raise
        finally:
            for box in boxes:
                self.unborn.remove(box)

    async def _forget(self, box: Box, ending: asyncio.Future[None]) -> None:
        await ending
        await self._node.journals.remove(box.id, box.owner)

    @contextlib.contextmanager
    def _place(
        self, name: str, owner: str, spec: SandboxSpec, shares: Sequence[Share] = ()
    ) -> Generator[None]:
        """Admits a sandbox, and counts it as one that is being started while the body runs."""
        if self._node.stop.is_set():
            raise RefusedError("the node is about to end", "draining")
        check(shares, spec, 1, self._node.held())
        while True:
            try:
                starting = [one for _, one in self.starting.values()]
                admit(self._node.limits, spec, self._node.specs(), starting, self._node.state_dir)
                break
            except RefusedError as error:
                if not owner or error.reason not in _ROOM or not self._node.warm.give_way():
                    raise
        self.starting[name] = owner, spec
        try:
            yield
        finally:
            del self.starting[name]

    async def settled(self, owner: str) -> None:
        """Returns when nothing is being started for an owner any more."""
        while any(who == owner for who, _ in self.starting.values()):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    async def _start(
        self, box_id: str, name: str, owner: str, backend: str, spec: SandboxSpec, pool: str = ""
    ) -> Box:
        marks = {NODE: str(self._node.state_dir), BOOT: self._node.boot, POOL: pool}
        marked = replace(spec, labels={**spec.labels, **marks})
        async with self._starts:
            if owner and owner not in self._node.tenants:
                raise LostError(f"the lease of {owner} ended before the sandbox was started")
            # A start is never left half-way: a client that goes away has it finished and undone.
            start = gate.start(self._node.backends[backend], self._node.state_dir, name, owner, marked)
            starting = asyncio.create_task(start)
            try:
                started = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self.undoing.add(name)
                self._node.later(self._undo(name, starting))
                raise
            if self._node.backends[backend].prepares(spec) and not self._node.stop.is_set():
                self._node.later(self._prepare(backend, spec))
            kept = replace(started.spec, labels=spec.labels) if started.spec else spec
            capabilities = self._node.backends[backend].capabilities()
            box = Box(box_id, owner, kept, backend, started, capabilities)
            box.name = name
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await box.ping(_START_TIMEOUT_S)
                    if started.settle is not None:
                        await started.settle()
            except BaseException as error:
                self._node.later(box.close())
                if isinstance(error, TimeoutError):
                    what = f"a {backend} sandbox said nothing for {_START_TIMEOUT_S:.0f} s"
                    raise StartTimeoutError(what) from error
                if isinstance(error, SandboxError):
                    raise InfrastructureError(f"a {backend} sandbox did not come up: {error}") from error
                raise
            return box

    async def _undo(self, name: str, starting: asyncio.Task[Started]) -> None:
        try:
            with contextlib.suppress(SandboxError):
                await (await starting).kill()
        finally:
            self.undoing.discard(name)


async def _all(*work: Awaitable[None]) -> None:
    """Does work at once; returns or raises when all of it has ended."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _head(box: Box) -> dict[str, Any]:
    return {
        "sandbox": box.id, "owner": box.owner, "backend": box.backend, "spec": asdict(box.spec),
        "key": box.key, "snapshot": box.snapshot,
    }  # fmt: skip
