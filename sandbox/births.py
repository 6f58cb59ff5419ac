"""How sandboxes come to be on a node: created, made anew from a journal, or forked; whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import weakref
from collections.abc import AsyncGenerator, Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sandbox.admission import admit
from sandbox.backends.base import Started
from sandbox.box import Box
from sandbox.errors import InfrastructureError, LostError, RefusedError, SandboxError, StartTimeoutError
from sandbox.journal import Journal
from sandbox.layers.compose import check_offered
from sandbox.recovery import Recorder, Replay
from sandbox.session import spec_from
from sandbox.snapshots import load
from sandbox.types import SandboxSpec

if TYPE_CHECKING:
    from sandbox.node import Node

_START_TIMEOUT_S = 60.0


class Births:
    """Starts the sandboxes of one node."""

    def __init__(self, node: Node):
        self._node = node
        self.starting: dict[str, SandboxSpec] = {}
        self.unborn: list[Box] = []
        self._starts = asyncio.Semaphore(node.limits.starts_at_once)
        self._keys = weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock]()

    async def create(
        self, owner: str, backend: str, spec: SandboxSpec, key: str = "", snapshot: str = ""
    ) -> Box:
        """Admits and starts one sandbox, and returns it once its agent answers.

        Args:
            owner: Whose it is.
            backend: The name of its backend.
            spec: What is asked for.
            key: Names the creation: a second one of the owner with the same key gets the same sandbox.
            snapshot: From which it starts, if any.

        Raises:
            RefusedError: It does not fit.
            PolicyError: The backend does not offer what the specification asks for.
            StartTimeoutError: It did not come up in time.
            InfrastructureError: It did not come up.
        """
        if key:
            async with self._keys.setdefault((owner, key), asyncio.Lock()):
                made = [box for box in self._node.living.values() if (box.owner, box.key) == (owner, key)]
                return made[0] if made else await self._create(owner, backend, spec, key, snapshot)
        return await self._create(owner, backend, spec, key, snapshot)

    async def _create(self, owner: str, backend: str, spec: SandboxSpec, key: str, snapshot: str) -> Box:
        if snapshot:
            self._node.snapshots.get(snapshot, owner)
        box_id = f"{self._node.boot}-{secrets.token_hex(6)}"
        with self._place(box_id, spec):
            box = await self._start(box_id, box_id, owner, backend, spec)
            box.key, box.snapshot = key, snapshot
            async with self._unborn_until_entered(box, fresh=True):
                if snapshot:
                    await load(box, self._node.snapshots.tree(snapshot))
                if spec.journal:
                    box.recorder = Recorder(await self._node.journals.create(box_id, _head(box)))
        return box

    async def attach(self, owner: str, box_id: str, *, replay: bool) -> tuple[Box, Replay]:
        """Returns a sandbox of an owner's earlier client, and what it took to have it.

        Args:
            owner: Whose it is.
            box_id: Its id.
            replay: Whether one that is gone is made anew, in its next generation, from its journal.

        Raises:
            LostError: There is none (any more), or it is gone and `replay` was not asked for.
            JournalMismatchError: Replayed, a command ended in another way.
            JournalError: The journal is damaged or does not hold all commands.
        """
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
            return await self._renew(owner, journal)
        except BaseException:
            self._node.journals.leave(box_id)
            raise

    async def _renew(self, owner: str, journal: Journal) -> tuple[Box, Replay]:
        box_id, spec = journal.head["sandbox"], spec_from(journal.head["spec"])
        name = f"{box_id}-g{journal.generation + 1}"
        with self._place(name, spec):
            box = await self._start(box_id, name, owner, journal.head["backend"], spec)
            box.key, box.snapshot, box.recorder = (
                journal.head["key"],
                journal.head["snapshot"],
                Recorder(journal),
            )
            async with self._unborn_until_entered(box):
                latest = self._node.snapshots.latest(box_id, owner)
                base = latest.id if latest else box.snapshot
                if base:
                    self._node.snapshots.get(base, owner)
                    await load(box, self._node.snapshots.tree(base))
                replayed = await box.replay(latest.seq if latest else 0)
                journal.renew(replayed.commands)
        return box, replayed

    async def fork(self, owner: str, box_id: str, count: int) -> list[Box]:
        """Starts `count` sandboxes with the files and the journal of one, all or none.

        Raises:
            RefusedError: They do not fit, or a command is running in it.
            FileError: It has files that cannot be read.
        """
        parent = self._node.box(box_id, owner)
        async with self._node.snapshots.passing(parent) as (taken, saving):
            children = [asyncio.create_task(self._child(parent, taken, saving)) for _ in range(count)]
            gone: list[BaseException] = []
            try:
                made = await asyncio.gather(*children, return_exceptions=True)
            except asyncio.CancelledError as error:
                gone.append(error)
                for child in children:
                    child.cancel()
                made = await asyncio.gather(*children, return_exceptions=True)
        boxes = [box for box in made if isinstance(box, Box)]
        for failure in (*gone, *(error for error in made if isinstance(error, BaseException))):
            await asyncio.gather(*(self._node.close_box(box.id, owner) for box in boxes))
            raise failure
        return boxes

    async def _child(self, parent: Box, taken: str, saving: asyncio.Task[int]) -> Box:
        box_id = f"{self._node.boot}-{secrets.token_hex(6)}"
        with self._place(box_id, parent.spec):
            box = await self._start(box_id, box_id, parent.owner, parent.backend, parent.spec)
            box.ttl_s, box.snapshot = parent.ttl_s, parent.snapshot
            async with self._unborn_until_entered(box, fresh=True):
                seq = await asyncio.shield(saving)
                await load(box, self._node.snapshots.tree(taken))
                if parent.recorder is not None:
                    past = parent.recorder.journal
                    box.background.skip(past.count("start", seq))
                    head = {**_head(box), "parent": parent.id, "parent_seq": seq}
                    box.recorder = Recorder(await self._node.journals.create(box_id, head, past, seq))
        return box

    @contextlib.asynccontextmanager
    async def _unborn_until_entered(self, box: Box, *, fresh: bool = False) -> AsyncGenerator[None]:
        """Enters the sandbox at the end, or ends it: a fresh one with its journal, which nobody asks for."""
        self.unborn.append(box)
        try:
            yield
            self._enter(box)
        except BaseException:
            ending = self._node.end(box)
            if fresh:
                self._node.later(self._forget(box, ending))
            raise
        finally:
            self.unborn.remove(box)

    async def _forget(self, box: Box, ending: asyncio.Task[None]) -> None:
        await ending
        await self._node.journals.remove(box.id, box.owner)

    @contextlib.contextmanager
    def _place(self, name: str, spec: SandboxSpec) -> Generator[None]:
        if self._node.stop.is_set():
            raise RefusedError("the node is about to end", "draining")
        held = [box.spec for box in self._node.living.values()]
        admit(self._node.limits, spec, held, self.starting.values(), self._node.state_dir)
        self.starting[name] = spec
        try:
            yield
        finally:
            del self.starting[name]

    def _enter(self, box: Box) -> None:
        self._node.living[box.id] = box
        if box.owner not in self._node.tenants:
            raise LostError(f"the lease of {box.owner} ended while the sandbox was being started")

    async def _start(self, box_id: str, name: str, owner: str, backend: str, spec: SandboxSpec) -> Box:
        check_offered(spec, self._node.backends[backend].capabilities(), backend)
        async with self._starts:
            # A start is never left half-way: a client that goes away has it finished and undone.
            starting = asyncio.create_task(self._node.backends[backend].start(name, owner, spec))
            try:
                started = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._node.later(self._undo(starting))
                raise
            capabilities = self._node.backends[backend].capabilities()
            box = Box(box_id, owner, started.spec or spec, backend, started, capabilities)
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await box.ping(_START_TIMEOUT_S)
            except BaseException as error:
                self._node.later(box.close())
                if isinstance(error, TimeoutError):
                    what = f"a {backend} sandbox said nothing for {_START_TIMEOUT_S:.0f} s"
                    raise StartTimeoutError(what) from error
                if isinstance(error, SandboxError):
                    raise InfrastructureError(f"a {backend} sandbox did not come up: {error}") from error
                raise
            return box

    async def _undo(self, starting: asyncio.Task[Started]) -> None:
        with contextlib.suppress(SandboxError):
            await (await starting).kill()


def _head(box: Box) -> dict[str, Any]:
    return {
        "sandbox": box.id, "owner": box.owner, "backend": box.backend, "spec": asdict(box.spec),
        "key": box.key, "snapshot": box.snapshot,
    }  # fmt: skip
