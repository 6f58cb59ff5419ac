"""The node agent: a process of its own that admits, holds and ends the sandboxes of this machine.

It listens on a Unix socket of mode 0600 in its state folder and outlives the clients that use it: an
owner's sandboxes stay until the owner closes them or its lease ends, which is `lease_s` seconds after its
last client has gone. A node that nobody has needed for some seconds ends itself. One node at a time has a
state folder: it holds a lock on it, and removes what a killed one left there before it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandbox.admission import NodeLimits, admit
from sandbox.backends.base import Backend, Started
from sandbox.backends.registry import backends, choose
from sandbox.box import Box
from sandbox.channel import ByteReader
from sandbox.errors import InfrastructureError, LostError, RefusedError, SandboxError, StartTimeoutError
from sandbox.journal import Journal
from sandbox.journals import Journals
from sandbox.load import load_of
from sandbox.recovery import Recorder, Replay
from sandbox.session import Session, spec_from
from sandbox.snapshots import Snapshot, Snapshots, load
from sandbox.types import SandboxSpec

SOCKET, RECORD, LOCK, READY = "node.sock", "node.json", "node.held", "ready"
_START_TIMEOUT_S = 60.0
_REAP_S = 0.5
_LOG = logging.getLogger("sandbox.node")


@dataclass(slots=True)
class Owner:
    """Somebody whose sandboxes stay while a client is connected, and `lease_s` seconds longer."""

    lease_s: float
    clients: int = 0
    seen: float = field(default_factory=time.monotonic)

    def leave(self) -> None:
        """Forgets a client; the lease runs from now."""
        self.clients, self.seen = self.clients - 1, time.monotonic()

    def expired(self) -> bool:
        """Whether the lease has ended."""
        return self.clients == 0 and time.monotonic() - self.seen > self.lease_s


class Node:
    """The sandboxes of one state folder, and who owns them."""

    def __init__(self, state_dir: Path, limits: NodeLimits, idle_s: float = 1.0):
        self._state_dir, self._limits, self._idle_s = state_dir, limits, idle_s
        self._boxes: dict[str, Box] = {}
        self._owners: dict[str, Owner] = {}
        self._backends = backends(state_dir)
        self._starting: dict[str, SandboxSpec] = {}
        self._starts = asyncio.Semaphore(limits.starts_at_once)
        self._journals, self.snapshots = Journals(state_dir), Snapshots(state_dir)
        self._keys: dict[tuple[str, str], asyncio.Lock] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._unborn: list[Box] = []
        self._boot = secrets.token_hex(4)
        self._sessions = 0
        self._idle_since = time.monotonic()
        self._stop = asyncio.Event()
        self.closing: set[asyncio.Task[None]] = set()

    async def serve(self, ready: int | None = None) -> None:
        """Serves until told to stop, or until nobody has needed the node for a while.

        Args:
            ready: A descriptor that hears `READY` once clients can connect.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        for backend in self._backends.values():
            if left := await backend.reclaim(self._state_dir):
                _LOG.warning("removed what an earlier node left: %s", ", ".join(left))
        self.snapshots.sweep()
        server = await self._listen()
        if ready is not None:
            os.write(ready, READY.encode())
            os.close(ready)
        tasks = [asyncio.create_task(self._reap()), asyncio.create_task(self._journals.tend())]
        try:
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            server.close()
            (self._state_dir / SOCKET).unlink(missing_ok=True)
            (self._state_dir / RECORD).unlink(missing_ok=True)
            for box in self._unborn:
                self._later(box.close())
            while self._starting:  # noqa: ASYNC110 (no new ones come: the node is draining)
                await asyncio.sleep(0.01)
            for name in [*self._boxes]:
                self._close(self._boxes[name])
            await asyncio.gather(*self.closing, return_exceptions=True)
            for backend in self._backends.values():
                backend.leave()

    async def _listen(self) -> asyncio.Server:
        path = self._state_dir / SOCKET
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._client, path, limit=1 << 22)
        path.chmod(0o600)
        record = {"pid": os.getpid(), "boot": self._boot}
        (self._state_dir / RECORD).write_text(json.dumps(record))
        return server

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_S)
            for name in [name for name, owner in self._owners.items() if owner.expired()]:
                _LOG.info("the lease of %s ended", name)
                self._release(name)
            for box in [box for box in self._boxes.values() if box.expired()]:
                _LOG.info("sandbox %s of %s ended: %s", box.id, box.owner, box.resident.fault or "idle")
                self._close(box)
            now = time.monotonic()
            if self._owners or self._sessions or self._starting or self.closing:
                self._idle_since = now
            elif now - self._idle_since > self._idle_s:
                self._stop.set()

    async def _client(self, reader: ByteReader, writer: asyncio.StreamWriter) -> None:
        self._sessions += 1
        session = Session(self, reader, writer)
        try:
            await session.serve()
        except (LostError, ConnectionError):
            pass
        except SandboxError as error:
            _LOG.warning("a client was cut off: %s", error)
        finally:
            self._sessions -= 1
            await session.end()

    def join(self, name: str, lease_s: float) -> Owner:
        """Registers a client of an owner."""
        owner = self._owners.setdefault(name, Owner(lease_s))
        owner.lease_s, owner.seen = lease_s, time.monotonic()
        owner.clients += 1
        return owner

    async def pick(self, name: str) -> Backend:
        """Returns the backend that `name` (or `auto`) stands for on this machine."""
        return await choose(name, self._backends)

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
                made = [box for box in self._boxes.values() if (box.owner, box.key) == (owner, key)]
                return made[0] if made else await self._create(owner, backend, spec, key, snapshot)
        return await self._create(owner, backend, spec, key, snapshot)

    async def _create(self, owner: str, backend: str, spec: SandboxSpec, key: str, snapshot: str) -> Box:
        if snapshot:
            self.snapshots.get(snapshot, owner)
        box_id = f"{self._boot}-{secrets.token_hex(6)}"
        with self._place(box_id, spec):
            box = await self._start(box_id, box_id, owner, backend, spec)
            box.key, box.snapshot = key, snapshot
            async with self._unborn_until_entered(box):
                if snapshot:
                    await load(box, self.snapshots.tree(snapshot))
                if spec.journal:
                    box.recorder = Recorder(await self._journals.create(box_id, _head(box)))
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
        box = self._boxes.get(box_id)
        if box is not None and box.owner == owner:
            if box.resident.fault is None:
                return box, Replay(0, ())
            await self._close(box)
        elif ending := self._ending.get(box_id):
            await asyncio.shield(ending)
        if not replay:
            raise LostError(
                f"{owner} has no living sandbox {box_id}; if its journal is there, "
                "attaching with replay=True makes it anew"
            )
        journal = await self._journals.reopen(box_id, owner)
        try:
            return await self._renew(owner, journal)
        except BaseException:
            self._journals.leave(box_id)
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
                latest = self.snapshots.latest(box_id, owner)
                base = latest.id if latest else box.snapshot
                if base:
                    self.snapshots.get(base, owner)
                    await load(box, self.snapshots.tree(base))
                replayed = await box.replay(latest.seq if latest else 0)
                journal.renew(replayed.commands)
        return box, replayed

    async def fork(self, owner: str, box_id: str, count: int) -> list[Box]:
        """Starts `count` sandboxes with the files and the journal of one, all or none.

        Raises:
            RefusedError: They do not fit, or a command is running in it.
            FileError: It has files that cannot be read.
        """
        parent = self.box(box_id, owner)
        taken = await self.snapshots.take(parent)
        children = [asyncio.create_task(self._child(parent, taken)) for _ in range(count)]
        try:
            made = await asyncio.gather(*children, return_exceptions=True)
        except asyncio.CancelledError:
            for child in children:
                child.cancel()
            made = await asyncio.gather(*children, return_exceptions=True)
        finally:
            self.snapshots.remove(taken.id, owner)
        boxes = [box for box in made if isinstance(box, Box)]
        for failure in made:
            if isinstance(failure, BaseException):
                await asyncio.gather(*(self.close_box(box.id, owner) for box in boxes))
                raise failure
        return boxes

    async def _child(self, parent: Box, taken: Snapshot) -> Box:
        box_id = f"{self._boot}-{secrets.token_hex(6)}"
        with self._place(box_id, parent.spec):
            box = await self._start(box_id, box_id, parent.owner, parent.backend, parent.spec)
            box.ttl_s, box.snapshot = parent.ttl_s, parent.snapshot
            async with self._unborn_until_entered(box):
                await load(box, self.snapshots.tree(taken.id))
                if parent.recorder is not None:
                    past = parent.recorder.journal
                    box.background.skip(past.count("start", taken.seq))
                    head = {**_head(box), "parent": parent.id, "parent_seq": taken.seq}
                    box.recorder = Recorder(await self._journals.create(box_id, head, past, taken.seq))
        return box

    @contextlib.asynccontextmanager
    async def _unborn_until_entered(self, box: Box) -> AsyncGenerator[None]:
        self._unborn.append(box)
        try:
            yield
            self._enter(box)
        except BaseException:
            self._close(box)
            raise
        finally:
            self._unborn.remove(box)

    @contextlib.contextmanager
    def _place(self, name: str, spec: SandboxSpec) -> Generator[None]:
        if self._stop.is_set():
            raise RefusedError("the node is about to end", "draining")
        held = [box.spec for box in self._boxes.values()]
        admit(self._limits, spec, held, self._starting.values(), self._state_dir)
        self._starting[name] = spec
        try:
            yield
        finally:
            del self._starting[name]

    def _enter(self, box: Box) -> None:
        self._boxes[box.id] = box
        if box.owner not in self._owners:
            raise LostError(f"the lease of {box.owner} ended while the sandbox was being started")

    async def _start(self, box_id: str, name: str, owner: str, backend: str, spec: SandboxSpec) -> Box:
        async with self._starts:
            # A start is never left half-way: a client that goes away has it finished and undone.
            starting = asyncio.create_task(self._backends[backend].start(name, owner, spec))
            try:
                started = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._later(self._undo(starting))
                raise
            capabilities = self._backends[backend].capabilities()
            box = Box(box_id, owner, spec, backend, started, capabilities)
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await box.ping(_START_TIMEOUT_S)
            except BaseException as error:
                self._later(box.close())
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

    def box(self, box_id: str, owner: str) -> Box:
        """Returns a sandbox of an owner.

        Raises:
            LostError: There is none (any more).
        """
        box = self._boxes.get(box_id)
        if box is None or box.owner != owner:
            raise LostError(f"{owner} has no sandbox {box_id} (it ended, or is from before a restart)")
        if box.resident.fault is not None:
            raise box.resident.fault
        return box

    def boxes(self, owner: str) -> list[str]:
        """Returns the ids of an owner's sandboxes."""
        return [box.id for box in self._boxes.values() if box.owner == owner]

    def _close(self, box: Box) -> asyncio.Task[None]:
        self._boxes.pop(box.id, None)
        ending = self._ending[box.id] = self._later(self._end(box))
        return ending

    async def _end(self, box: Box) -> None:
        try:
            await box.close()
        finally:
            self._journals.leave(box.id)
            self._ending.pop(box.id, None)

    def _later(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)
        return task

    async def close_box(self, box_id: str, owner: str) -> None:
        """Ends a sandbox and deletes its journal; one that is gone already is fine."""
        if (box := self._boxes.get(box_id)) is not None and box.owner == owner:
            await self._close(box)
        elif ending := self._ending.get(box_id):
            await asyncio.shield(ending)
        await self._journals.remove(box_id, owner)

    def _release(self, name: str) -> list[asyncio.Task[None]]:
        self._owners.pop(name, None)
        return [self._close(box) for box in [box for box in self._boxes.values() if box.owner == name]]

    async def release(self, name: str) -> int:
        """Ends an owner's lease, sandboxes and their journals now; returns how many sandboxes there were."""
        held = self.boxes(name)
        await asyncio.gather(*self._release(name), return_exceptions=True)
        for box_id in held:
            await self._journals.remove(box_id, name)
        for snapshot in self.snapshots.of(name):
            self.snapshots.remove(snapshot.id, name)
        return len(held)

    def owners(self) -> dict[str, dict[str, Any]]:
        """Returns who holds what."""
        return {
            name: {"sandboxes": len(self.boxes(name)), "clients": owner.clients}
            for name, owner in sorted(self._owners.items())
        }

    def keys(self, owner: str) -> dict[str, str]:
        """Returns the ids of an owner's sandboxes by the keys of their creation."""
        return {box.key: box.id for box in self._boxes.values() if box.owner == owner and box.key}

    def backends_of(self, owner: str) -> dict[str, str]:
        """Returns the backends of an owner's sandboxes by their ids."""
        return {box.id: box.backend for box in self._boxes.values() if box.owner == owner}

    def load(self) -> dict[str, Any]:
        """Returns what the node admits, has given away in all and to each owner, and is starting."""
        starting = self._starting.values()
        held = [(box.owner, box.spec) for box in self._boxes.values()]
        return load_of(self._limits, held, starting, draining=self._stop.is_set())


def _head(box: Box) -> dict[str, Any]:
    return {
        "sandbox": box.id, "owner": box.owner, "backend": box.backend, "spec": asdict(box.spec),
        "key": box.key, "snapshot": box.snapshot,
    }  # fmt: skip


@contextlib.contextmanager
def held(state_dir: Path) -> Generator[None]:
    """Holds the state folder; waits for the node that ends there."""
    with (state_dir / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _detach(ready: int) -> None:
    """Makes this process nobody's child, in a session of its own: no client takes it along when it ends."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    os.set_inheritable(ready, False)


def main() -> None:
    """Runs a node until nobody needs it; with `--detach` says `ready` on stdout and goes on by itself."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.node", description=__doc__)
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--max-sandboxes", type=int, default=NodeLimits().sandboxes)
    parser.add_argument("--detach", action="store_true")
    arguments = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    ready = os.dup(1) if arguments.detach else None
    if ready is not None:
        _detach(ready)
    with held(arguments.state_dir):
        asyncio.run(Node(arguments.state_dir, NodeLimits(sandboxes=arguments.max_sandboxes)).serve(ready))


if __name__ == "__main__":
    main()
