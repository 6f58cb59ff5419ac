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
import ctypes
import fcntl
import functools
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox import health, owners
from sandbox.admission import NodeLimits
from sandbox.backends.base import Backend
from sandbox.backends.registry import backends, choose
from sandbox.births import Births
from sandbox.box import Box
from sandbox.egress import doors
from sandbox.egress.gate import denied
from sandbox.errors import InfrastructureError, LostError, SandboxError
from sandbox.frames import FrameProtocol
from sandbox.journals import Journals
from sandbox.leases import LeaseFile
from sandbox.load import load_of
from sandbox.reaper import PERIOD_S, Reaper
from sandbox.session import Session
from sandbox.snapshots import Snapshots
from sandbox.types import SandboxSpec
from sandbox.warm import OPERATOR, WarmPools
from sandbox.warm_spec import WARM, Warm, read_warm

SOCKET, RECORD, LOCK, READY = "node.sock", "node.json", "node.held", "ready"
_REAP_S = 0.5
_M_MMAP_THRESHOLD, _LARGE = -3, 1 << 18
"""A setting of glibc (`mallopt`), and from what size memory is given back at once when it is freed."""

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

    def left(self) -> float:
        """Returns how many seconds of the lease are left; all of it while a client is there."""
        return self.lease_s if self.clients else self.lease_s - (time.monotonic() - self.seen)

    def expired(self) -> bool:
        """Whether the lease has ended."""
        return self.left() < 0


class Node:
    """The sandboxes of one state folder, and who owns them."""

    def __init__(
        self,
        state_dir: Path,
        limits: NodeLimits,
        idle_s: float = 1.0,
        reap_s: float = PERIOD_S,
        warm: Sequence[Warm] = (),
    ):
        self.state_dir, self.limits, self._idle_s = state_dir, limits, idle_s
        self.living: dict[str, Box] = {}
        self.tenants: dict[str, Owner] = {}
        self.backends = backends(state_dir)
        self.journals, self.snapshots = Journals(state_dir), Snapshots(state_dir)
        self.ending: dict[str, asyncio.Task[None]] = {}
        self.fading: set[str] = set()
        self.boot = secrets.token_hex(4)
        self.leases = LeaseFile.open(state_dir, self.boot)
        self._sessions = 0
        self._idle_since = time.monotonic()
        self.stop = asyncio.Event()
        self.closing: set[asyncio.Task[None]] = set()
        self.births, self.warm = Births(self), WarmPools(self)
        self._reaper, self._wanted = Reaper(self, reap_s), warm

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
        self.journals.drop_unbegun()
        await self.leases.drop(lambda lease: lease.journal and not self.journals.has(lease.sandbox))
        for one in self._wanted:
            await self.warm.want(OPERATOR, one.backend, one.spec, one.count)
        doors.sweep(self.state_dir)
        owners.sweep(self.state_dir)
        server = await self._listen()
        if ready is not None:
            os.write(ready, READY.encode())
            os.close(ready)
        work = (
            self._reap(), self.journals.tend(), self.warm.tend(), self._reaper.tend(),
            health.tend(self.living),
        )  # fmt: skip
        tasks = [asyncio.create_task(one) for one in work]
        try:
            await self.stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            server.close()
            (self.state_dir / SOCKET).unlink(missing_ok=True)
            (self.state_dir / RECORD).unlink(missing_ok=True)
            for box in self.births.unborn:
                self.later(box.close())
            while self.births.starting:  # noqa: ASYNC110 (no new ones come: the node is draining)
                await asyncio.sleep(0.01)
            await self.warm.end()
            for name in [*self.living]:
                self.end(self.living[name])
            while self.closing or self.births.ahead:
                self.births.end()
                await asyncio.gather(*self.closing, return_exceptions=True)
            await self.leases.close()
            for backend in self.backends.values():
                backend.leave()

    async def _listen(self) -> asyncio.Server:
        path = self.state_dir / SOCKET
        path.unlink(missing_ok=True)
        server = await asyncio.get_running_loop().create_unix_server(
            functools.partial(FrameProtocol, self._meet), path
        )
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
            if over := self.leases.expired(self.tenants):
                self.later(self._forget(*(lease.sandbox for lease in over)))
            now = time.monotonic()
            if self.tenants or self._sessions or self.births.starting or self.closing:
                self._idle_since = now
            elif now - self._idle_since > self._idle_s:
                self.stop.set()

    def _meet(self, channel: FrameProtocol) -> None:
        """Serves a client until it goes."""
        self._sessions += 1
        session = Session(self, channel)

        def lost(fault: SandboxError) -> None:
            if not isinstance(fault, LostError):
                _LOG.warning("a client was cut off: %s", fault)
            self._sessions -= 1
            self.later(session.end())

        channel.listen(session.take, lost)

    def join(self, name: str, lease_s: float) -> Owner:
        """Registers a client of an owner; a lease that an earlier one asked for is not made shorter."""
        owner = self.tenants.setdefault(name, Owner(lease_s))
        owner.lease_s, owner.seen = max(owner.lease_s, lease_s), time.monotonic()
        owner.clients += 1
        return owner

    async def pick(self, name: str) -> Backend:
        """Returns the backend that `name` (or `auto`) stands for on this machine."""
        return await choose(name, self.backends)

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

    def end(self, box: Box) -> asyncio.Future[None]:
        """Begins to end a sandbox; returns what is done when it is gone. To stop waiting stops nothing."""
        if self.living.get(box.id) is box:
            del self.living[box.id]
        self.fading.add(box.name)
        ending = self.ending[box.id] = self.later(self._ended(box))
        return asyncio.shield(ending)

    async def _ended(self, box: Box) -> None:
        try:
            await box.close()
        finally:
            self.journals.leave(box.id)
            # What a node that stops takes along may still be asked for, of the next one.
            if not self.stop.is_set() or not box.owner:
                await self._forget(box.id)
            self.ending.pop(box.id, None)
            self.fading.discard(box.name)

    async def _forget(self, *sandboxes: str) -> None:
        try:
            await self.leases.end(*sandboxes)
        except InfrastructureError as error:
            _LOG.error("%s", error)

    def later(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Has work done that the end of the node waits for."""
        task = asyncio.create_task(work)
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)
        return task

    async def close_box(self, box_id: str, owner: str) -> None:
        """Ends a sandbox and deletes its journal; one that is gone already is fine.

        What was begun is finished, also when who asked for it goes away.
        """
        await asyncio.shield(self.later(self._closed(box_id, owner)))

    async def _closed(self, box_id: str, owner: str) -> None:
        async with self.births.turns.of(owner, f"sandbox {box_id}"):  # somebody may just be making it anew
            if (box := self.living.get(box_id)) is not None and box.owner == owner:
                await self.end(box)
            elif ending := self.ending.get(box_id):
                await asyncio.shield(ending)
            elif (lost := self.leases.lost.get(box_id)) is not None and lost.owner == owner:
                await self._forget(box_id)
            await self.journals.remove(box_id, owner)

    def _release(self, name: str) -> list[asyncio.Future[None]]:
        self.tenants.pop(name, None)
        self.warm.forget(name)
        return [self.end(box) for box in [box for box in self.living.values() if box.owner == name]]

    async def release(self, name: str) -> int:
        """Ends an owner's lease, sandboxes and their journals now; returns how many sandboxes there were.

        What is just being started for the owner is waited for, and ended too.
        """
        held = self.boxes(name)
        lost = [lease.sandbox for lease in self.leases.of(name)]
        await asyncio.gather(*self._release(name), return_exceptions=True)
        await self.births.settled(name)
        await asyncio.gather(*self.ending.values(), return_exceptions=True)
        await self._forget(*lost)
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
        """Returns the ids of an owner's sandboxes by the keys of their creation, lost ones included."""
        held = [*self.leases.of(owner), *self.leases.live.values()]
        return {one.key: one.sandbox for one in held if one.owner == owner and one.key}

    def backends_of(self, owner: str) -> dict[str, str]:
        """Returns the backends of an owner's sandboxes by their ids."""
        return {box.id: box.backend for box in self.living.values() if box.owner == owner}

    def load(self) -> dict[str, Any]:
        """Returns what the node admits, has given away in all and to each owner, and is starting."""
        load = load_of(
            self.limits,
            [(box.owner, box.spec) for box in self.living.values()],
            [spec for _, spec in self.births.starting.values()],
            warm=[box.spec for box in self.warm.boxes()],
            hints=self.warm.hints(),
            draining=self.stop.is_set(),
        )
        load |= {"warm": self.warm.counts(), "pools": self.warm.about(), "reaper": self._reaper.about()}
        return {**load, "denials": denied(box.started.gate for box in self.living.values())}

    def specs(self) -> list[SandboxSpec]:
        """Returns what is held of the node's room: by owners, and by the warm pools."""
        return [box.spec for box in (*self.living.values(), *self.warm.boxes())]

    def held(self) -> Iterator[tuple[str, SandboxSpec]]:
        """Yields what counts in the quotas of owners: held, being started, kept warm for them."""
        yield from ((box.owner, box.spec) for box in (*self.living.values(), *self.warm.boxes()) if box.owner)
        yield from ((owner, spec) for owner, spec in self.births.starting.values() if owner)
        yield from self.warm.hints()


@contextlib.contextmanager
def held(state_dir: Path) -> Generator[None]:
    """Holds the state folder; waits for the node that ends there."""
    with (state_dir / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _give_back() -> None:
    """Has what large bodies took go back when they are done with: glibc else keeps as much as it saw once."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)


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


def threads(limits: NodeLimits) -> int:
    """Returns how many threads a node may have: as many as starts at once, and for what is written then."""
    return limits.starts_at_once + 8


async def _serve(
    state_dir: Path, limits: NodeLimits, times: tuple[float, float], warm: Sequence[Warm], ready: int | None
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads(limits), "node"))
    await Node(state_dir, limits, *times, warm).serve(ready)


def main() -> None:
    """Runs a node until nobody needs it; with `--detach` says `ready` on stdout and goes on by itself."""
    import uvloop  # only here: clients have this module too, and a loop of their own

    parser = argparse.ArgumentParser(prog="python -m sandbox.node", description=__doc__)
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--max-sandboxes", type=int, default=NodeLimits().sandboxes)
    parser.add_argument("--reap-s", type=float, default=PERIOD_S)
    parser.add_argument("--idle-s", type=float, default=1.0)
    parser.add_argument("--warm", action="append", metavar="FILE[=COUNT]")
    parser.add_argument("--detach", action="store_true")
    arguments = parser.parse_args()
    os.umask(0o077)
    _give_back()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    words = arguments.warm or [word for word in os.environ.get(WARM, "").split(":") if word]
    warm = [read_warm(word) for word in words]
    limits = NodeLimits(sandboxes=arguments.max_sandboxes)
    ready = os.dup(1) if arguments.detach else None
    if ready is not None:
        _detach(ready)
    with held(arguments.state_dir):
        times = (arguments.idle_s, arguments.reap_s)
        uvloop.run(_serve(arguments.state_dir, limits, times, warm, ready))


if __name__ == "__main__":
    main()
