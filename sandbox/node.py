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
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox import health
from sandbox.admission import NodeLimits
from sandbox.backends.base import Backend
from sandbox.backends.registry import backends, choose
from sandbox.births import Births
from sandbox.box import Box
from sandbox.channel import ByteReader
from sandbox.errors import LostError, PolicyError, SandboxError
from sandbox.journals import Journals
from sandbox.load import load_of
from sandbox.recovery import Replay
from sandbox.session import Session
from sandbox.snapshots import Snapshots
from sandbox.types import SandboxSpec

SOCKET, RECORD, LOCK, READY = "node.sock", "node.json", "node.held", "ready"
_REAP_S = 0.5
_MAX_LEASE_S = 30 * 86400.0
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
        self.state_dir, self.limits, self._idle_s = state_dir, limits, idle_s
        self.living: dict[str, Box] = {}
        self.tenants: dict[str, Owner] = {}
        self.backends = backends(state_dir)
        self.journals, self.snapshots = Journals(state_dir), Snapshots(state_dir)
        self.ending: dict[str, asyncio.Task[None]] = {}
        self.boot = secrets.token_hex(4)
        self._sessions = 0
        self._idle_since = time.monotonic()
        self.stop = asyncio.Event()
        self.closing: set[asyncio.Task[None]] = set()
        self._births = Births(self)

    async def serve(self, ready: int | None = None) -> None:
        """Serves until told to stop, or until nobody has needed the node for a while.

        Args:
            ready: A descriptor that hears `READY` once clients can connect.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)
        for backend in self.backends.values():
            if left := await backend.reclaim(self.state_dir):
                _LOG.warning("removed what an earlier node left: %s", ", ".join(left))
        self.snapshots.sweep()
        server = await self._listen()
        if ready is not None:
            os.write(ready, READY.encode())
            os.close(ready)
        tasks = [
            asyncio.create_task(self._reap()),
            asyncio.create_task(health.tend(self.living)),
            asyncio.create_task(self.journals.tend()),
        ]
        try:
            await self.stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            server.close()
            (self.state_dir / SOCKET).unlink(missing_ok=True)
            (self.state_dir / RECORD).unlink(missing_ok=True)
            for box in self._births.unborn:
                self.later(box.close())
            while self._births.starting:  # noqa: ASYNC110 (no new ones come: the node is draining)
                await asyncio.sleep(0.01)
            for name in [*self.living]:
                self.end(self.living[name])
            await asyncio.gather(*self.closing, return_exceptions=True)
            for backend in self.backends.values():
                backend.leave()

    async def _listen(self) -> asyncio.Server:
        path = self.state_dir / SOCKET
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._client, path, limit=1 << 22)
        path.chmod(0o600)
        record = {"pid": os.getpid(), "boot": self.boot}
        (self.state_dir / RECORD).write_text(json.dumps(record))
        return server

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_S)
            for name in [name for name, owner in self.tenants.items() if owner.expired()]:
                _LOG.info("the lease of %s ended", name)
                self._release(name)
            for box in [box for box in self.living.values() if box.expired()]:
                _LOG.info("sandbox %s of %s ended: %s", box.id, box.owner, box.resident.fault or "idle")
                self.end(box)
            now = time.monotonic()
            if self.tenants or self._sessions or self._births.starting or self.closing:
                self._idle_since = now
            elif now - self._idle_since > self._idle_s:
                self.stop.set()

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
        """Registers a client of an owner.

        Raises:
            PolicyError: The lease is no time, or would hardly ever end.
        """
        if not 0 <= lease_s <= _MAX_LEASE_S:
            raise PolicyError(f"a lease is of 0 to {_MAX_LEASE_S} seconds, not {lease_s}")
        owner = self.tenants.setdefault(name, Owner(lease_s))
        owner.lease_s, owner.seen = lease_s, time.monotonic()
        owner.clients += 1
        return owner

    async def pick(self, name: str) -> Backend:
        """Returns the backend that `name` (or `auto`) stands for on this machine."""
        return await choose(name, self.backends)

    async def create(
        self, owner: str, backend: str, spec: SandboxSpec, key: str = "", snapshot: str = ""
    ) -> Box:
        """Admits and starts one sandbox; see `Births.create`."""
        return await self._births.create(owner, backend, spec, key, snapshot)

    async def attach(self, owner: str, box_id: str, *, replay: bool) -> tuple[Box, Replay]:
        """Returns a sandbox of an owner's earlier client; see `Births.attach`."""
        return await self._births.attach(owner, box_id, replay=replay)

    async def fork(self, owner: str, box_id: str, count: int) -> list[Box]:
        """Starts `count` sandboxes with the files and the journal of one; see `Births.fork`."""
        return await self._births.fork(owner, box_id, count)

    def box(self, box_id: str, owner: str) -> Box:
        """Returns a sandbox of an owner.

        Raises:
            LostError: There is none (any more).
        """
        box = self.living.get(box_id)
        if box is None or box.owner != owner:
            raise LostError(f"{owner} has no sandbox {box_id} (it ended, or is from before a restart)")
        if box.resident.fault is not None:
            raise box.resident.fault
        return box

    def boxes(self, owner: str) -> list[str]:
        """Returns the ids of an owner's sandboxes."""
        return [box.id for box in self.living.values() if box.owner == owner]

    def end(self, box: Box) -> asyncio.Task[None]:
        """Begins to end a sandbox; returns what is done when it is gone."""
        self.living.pop(box.id, None)
        ending = self.ending[box.id] = self.later(self._ended(box))
        return ending

    async def _ended(self, box: Box) -> None:
        try:
            await box.close()
        finally:
            self.journals.leave(box.id)
            self.ending.pop(box.id, None)

    def later(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Has work done that the end of the node waits for."""
        task = asyncio.create_task(work)
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)
        return task

    async def close_box(self, box_id: str, owner: str) -> None:
        """Ends a sandbox and deletes its journal; one that is gone already is fine."""
        if (box := self.living.get(box_id)) is not None and box.owner == owner:
            await self.end(box)
        elif ending := self.ending.get(box_id):
            await asyncio.shield(ending)
        await self.journals.remove(box_id, owner)

    def _release(self, name: str) -> list[asyncio.Task[None]]:
        self.tenants.pop(name, None)
        return [self.end(box) for box in [box for box in self.living.values() if box.owner == name]]

    async def release(self, name: str) -> int:
        """Ends an owner's lease, sandboxes and their journals now; returns how many sandboxes there were."""
        held = self.boxes(name)
        await asyncio.gather(*self._release(name), return_exceptions=True)
        for box_id in {*held, *await asyncio.to_thread(self.journals.of, name)}:
            await self.journals.remove(box_id, name)
        for snapshot in self.snapshots.of(name):
            self.snapshots.remove(snapshot.id, name)
        return len(held)

    def owners(self) -> dict[str, dict[str, Any]]:
        """Returns who holds what."""
        return {
            name: {"sandboxes": len(self.boxes(name)), "clients": owner.clients}
            for name, owner in sorted(self.tenants.items())
        }

    def keys(self, owner: str) -> dict[str, str]:
        """Returns the ids of an owner's sandboxes by the keys of their creation."""
        return {box.key: box.id for box in self.living.values() if box.owner == owner and box.key}

    def backends_of(self, owner: str) -> dict[str, str]:
        """Returns the backends of an owner's sandboxes by their ids."""
        return {box.id: box.backend for box in self.living.values() if box.owner == owner}

    def load(self) -> dict[str, Any]:
        """Returns what the node admits, has given away in all and to each owner, and is starting."""
        starting = self._births.starting.values()
        held = [(box.owner, box.spec) for box in self.living.values()]
        return load_of(self.limits, held, starting, draining=self.stop.is_set())


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
