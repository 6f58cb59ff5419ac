"""The node agent: a process of its own that admits, holds and ends the sandboxes of this machine.

It listens on a Unix socket of mode 0600 in its state folder and outlives the clients that use it: an owner's
sandboxes stay until the owner closes them or its lease ends (its last client has been silent for `lease_s`).
Admission is hard: what does not fit is refused with a reason, never queued. A node without owners ends itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.backends.base import Backend
from sandbox.backends.registry import BACKENDS, choose
from sandbox.box import Box
from sandbox.channel import Header, encode, read_frame
from sandbox.errors import InfrastructureError, LostError, RefusedError, SandboxError, to_wire
from sandbox.types import Limits, SandboxSpec

SOCKET, RECORD = "node.sock", "node.json"
_START_TIMEOUT_S = 60.0
_REAP_S = 0.5
_LOG = logging.getLogger("sandbox.node")


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """What a node admits: sandboxes at once, their memory in sum, sandboxes being started at once."""

    sandboxes: int = 256
    memory_bytes: int = 64 << 30
    starting: int = 16


@dataclass(slots=True)
class Owner:
    """Somebody whose sandboxes stay while a client is connected, and `lease_s` seconds longer."""

    lease_s: float
    clients: int = 0
    seen: float = field(default_factory=time.monotonic)

    def expired(self) -> bool:
        """Whether the lease has ended."""
        return self.clients == 0 and time.monotonic() - self.seen > self.lease_s


class Node:
    """Serves clients; see the module docstring."""

    def __init__(self, state_dir: Path, limits: NodeLimits, idle_s: float = 5.0):
        self._state_dir, self._limits, self._idle_s = state_dir, limits, idle_s
        self._boxes: dict[str, Box] = {}
        self._owners: dict[str, Owner] = {}
        self._backends: dict[str, Backend] = {}
        self._starting: dict[str, SandboxSpec] = {}
        self._boot = secrets.token_hex(4)
        self._idle_since = time.monotonic()
        self._stop = asyncio.Event()

    async def serve(self) -> None:
        """Serves until told to stop, or until nobody has needed the node for a while."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        for backend in BACKENDS.values():
            if left := await backend.reclaim(frozenset()):
                _LOG.warning("removed %d sandboxes of an earlier node: %s", len(left), ", ".join(left))
        path = self._state_dir / SOCKET
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._client, path, limit=1 << 22)
        path.chmod(0o600)
        record = {"pid": os.getpid(), "boot": self._boot}
        (self._state_dir / RECORD).write_text(json.dumps(record))
        reaper = asyncio.create_task(self._reap())
        try:
            await self._stop.wait()
        finally:
            reaper.cancel()
            server.close()
            await asyncio.gather(*(box.close() for box in self._boxes.values()), return_exceptions=True)
            path.unlink(missing_ok=True)
            (self._state_dir / RECORD).unlink(missing_ok=True)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_S)
            for name in [name for name, owner in self._owners.items() if owner.expired()]:
                _LOG.info("the lease of %s ended", name)
                await self._release(name)
            now = time.monotonic()
            for box in [
                b for b in self._boxes.values() if now - b.created > b.spec.ttl_s or b.resident.fault
            ]:
                await self._close(box)
            if self._owners:
                self._idle_since = now
            elif now - self._idle_since > self._idle_s:
                self._stop.set()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = _Session(self, reader, writer)
        try:
            await session.serve()
        except (LostError, ConnectionError):
            pass
        except SandboxError as error:
            _LOG.warning("a client was cut off: %s", error)
        finally:
            await session.end()

    def join(self, name: str, lease_s: float) -> Owner:
        """Registers a client of an owner."""
        owner = self._owners.setdefault(name, Owner(lease_s))
        owner.lease_s, owner.seen = lease_s, time.monotonic()
        owner.clients += 1
        return owner

    async def pick(self, name: str) -> str:
        """Returns the backend that `name` (or `auto`) stands for on this machine."""
        backend = await choose(name)
        self._backends[backend.name] = backend
        return backend.name

    async def create(self, owner: str, backend: str, spec: SandboxSpec) -> str:
        """Admits and starts one sandbox, and returns its id once its agent answers.

        Raises:
            RefusedError: It does not fit.
            InfrastructureError: It did not come up.
        """
        self._admit(spec)
        box_id = f"{self._boot}-{secrets.token_hex(6)}"
        self._starting[box_id] = spec
        try:
            started = await self._backends[backend].start(box_id, owner, spec)
            box = Box(box_id, owner, spec, started)
            self._boxes[box_id] = box
        finally:
            del self._starting[box_id]
        try:
            await box.ping(_START_TIMEOUT_S)
        except SandboxError as error:
            await self._close(box)
            raise InfrastructureError(f"a {backend} sandbox did not come up: {error}") from error
        except asyncio.CancelledError:
            await self._close(box)
            raise
        return box_id

    def _admit(self, spec: SandboxSpec) -> None:
        held = [box.spec for box in self._boxes.values()] + list(self._starting.values())
        if len(held) >= self._limits.sandboxes:
            raise RefusedError(f"the node holds its {self._limits.sandboxes} sandboxes", "sandboxes")
        if len(self._starting) >= self._limits.starting:
            raise RefusedError(f"{len(self._starting)} sandboxes are being started; try again", "start_rate")
        memory = sum(s.limits.memory_bytes for s in held) + spec.limits.memory_bytes
        if memory > self._limits.memory_bytes:
            raise RefusedError(
                f"memory limits would add up to {memory >> 20} MiB of {self._limits.memory_bytes >> 20}",
                "memory",
            )

    def box(self, box_id: str, owner: str) -> Box:
        """Returns a sandbox of an owner.

        Raises:
            LostError: There is none (any more).
        """
        box = self._boxes.get(box_id)
        if box is None or box.owner != owner:
            raise LostError(
                f"there is no sandbox {box_id} of {owner} (ended, expired, or from before a restart)"
            )
        return box

    async def _close(self, box: Box) -> None:
        self._boxes.pop(box.id, None)
        await box.close()

    async def close_box(self, box_id: str, owner: str) -> None:
        """Ends a sandbox; one that is gone already is fine."""
        with contextlib.suppress(LostError):
            await self._close(self.box(box_id, owner))

    async def _release(self, name: str) -> int:
        self._owners.pop(name, None)
        boxes = [box for box in self._boxes.values() if box.owner == name]
        for box in boxes:
            await self._close(box)
        return len(boxes)

    async def release(self, name: str) -> int:
        """Ends an owner's lease and sandboxes now; returns how many there were."""
        return await self._release(name)

    def owners(self) -> dict[str, dict[str, Any]]:
        """Returns who holds what."""
        names = set(self._owners) | {box.owner for box in self._boxes.values()}
        return {
            name: {
                "sandboxes": sum(box.owner == name for box in self._boxes.values()),
                "clients": self._owners[name].clients if name in self._owners else 0,
            }
            for name in sorted(names)
        }

    def stop(self) -> None:
        """Ends the node."""
        self._stop.set()


class _Session:
    """One client's connection: requests in, replies out, each request a task of its own."""

    def __init__(self, node: Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._node, self._reader, self._writer = node, reader, writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._owner, self._name = None, ""

    async def serve(self) -> None:
        """Reads requests until the client goes."""
        while True:
            header, body = await read_frame(self._reader)
            number = int(header["id"])
            if header["op"] == "cancel":
                if task := self._tasks.get(int(header["target"])):
                    task.cancel()
                continue
            task = asyncio.create_task(self._answer(header, body))
            self._tasks[number] = task
            task.add_done_callback(lambda _, number=number: self._tasks.pop(number, None))

    async def end(self) -> None:
        """Forgets the client; its commands are killed, its sandboxes stay until the lease ends."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._owner is not None:
            self._owner.clients -= 1
            self._owner.seen = time.monotonic()
        self._writer.close()

    async def _answer(self, header: Header, body: bytes) -> None:
        try:
            reply, data = await getattr(self, f"_op_{header['op']}")(header, body)
        except SandboxError as error:
            reply, data = {"error": to_wire(error)}, b""
        except (OSError, KeyError, TypeError, ValueError) as error:
            _LOG.exception("request %s failed", header.get("op"))
            reply, data = {"error": to_wire(InfrastructureError(f"{type(error).__name__}: {error}"))}, b""
        self._writer.write(encode({**reply, "id": header["id"]}, data))
        await self._writer.drain()

    async def _op_hello(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        backend = await self._node.pick(header["backend"])
        self._name = header["owner"]
        self._owner = self._node.join(self._name, float(header["lease_s"]))
        return {"backend": backend, "pid": os.getpid()}, b""

    async def _op_create(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        return {"box": await self._node.create(self._name, header["backend"], spec_from(header["spec"]))}, b""

    async def _op_run(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        box = self._node.box(header["box"], self._name)
        result = await box.run(header["command"], body)
        fields = {
            name: getattr(result, name)
            for name in ("exit_code", "truncated", "timed_out", "oom", "duration_s")
        }
        return {**fields, "stdout_bytes": len(result.stdout)}, result.stdout + result.stderr

    async def _op_read(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        return {}, await self._node.box(header["box"], self._name).read_file(header["path"], header["limit"])

    async def _op_write(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        await self._node.box(header["box"], self._name).write_file(header["path"], body, header["mode"])
        return {}, b""

    async def _op_close(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        await self._node.close_box(header["box"], self._name)
        return {}, b""

    async def _op_release(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        self._owner = None if header["owner"] == self._name else self._owner
        return {"sandboxes": await self._node.release(header["owner"])}, b""

    async def _op_owners(self, header: Header, body: bytes) -> tuple[Header, bytes]:
        return {"owners": self._node.owners()}, b""


def spec_from(data: Mapping[str, Any]) -> SandboxSpec:
    """Returns the specification that a client sent as JSON values."""
    return SandboxSpec(**{**data, "limits": Limits(**data["limits"])})


def main() -> None:
    """Runs a node until nobody needs it."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.node", description=__doc__)
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--max-sandboxes", type=int, default=NodeLimits().sandboxes)
    arguments = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(Node(arguments.state_dir, NodeLimits(sandboxes=arguments.max_sandboxes)).serve())


if __name__ == "__main__":
    main()
