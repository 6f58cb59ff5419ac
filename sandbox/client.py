"""The SDK: what a rollout uses to get sandboxes and to run commands in them.

    async with await Fleet.connect("local", state_dir=Path("~/.tempering"), owner="my-run") as fleet:
        async with await fleet.create(SandboxSpec()) as box:
            print((await box.exec("echo hello")).stdout)

`local` starts the node of this machine as a process of its own when none answers. The node's sandboxes belong
to an owner and outlive a killed client until the owner's lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sandbox.channel import Header, encode, read_frame
from sandbox.errors import InfrastructureError, LostError, SandboxError, from_wire
from sandbox.node import SOCKET
from sandbox.types import ExecResult, SandboxSpec

_START_S = 20.0
DEFAULT_LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What `Fleet.reclaim` removed: sandboxes by owner."""

    sandboxes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of sandboxes removed."""
        return sum(self.sandboxes.values())


class Fleet:
    """A connection to a node, on behalf of one owner. Open it with `async with await Fleet.connect(...)`."""

    def __init__(self, connection: Connection, owner: str, backend: str, node_pid: int):
        self._connection = connection
        self.owner, self.backend, self.node_pid = owner, backend, node_pid

    @classmethod
    async def connect(
        cls,
        url: str = "local",
        *,
        state_dir: Path,
        owner: str,
        backend: str = "auto",
        lease_s: float = DEFAULT_LEASE_S,
    ) -> Fleet:
        """Connects to the node of this machine, starting it when none answers.

        Raises:
            BackendMissingError: The backend asked for (or any, for `auto`) is not to be had here.
            InfrastructureError: The node does not start.
        """
        if url != "local":
            raise InfrastructureError(f"only 'local' fleets can be reached yet, not {url!r}")
        connection = await _reach(state_dir)
        try:
            hello = {"op": "hello", "owner": owner, "backend": backend, "lease_s": lease_s}
            reply, _ = await connection.request(hello)
        except SandboxError:
            await connection.close()
            raise
        return cls(connection, owner, reply["backend"], reply["pid"])

    @staticmethod
    async def reclaim(state_dir: Path, keep_owners: frozenset[str] = frozenset()) -> Reclaimed:
        """Ends the sandboxes of owners without a client that are not in `keep_owners`."""
        try:
            connection = await Connection.open(state_dir / SOCKET)
        except (OSError, LostError):
            return Reclaimed()
        try:
            owners = (await connection.request({"op": "owners"}))[0]["owners"]
            gone = [n for n, held in owners.items() if n not in keep_owners and not held["clients"]]
            ended = {
                n: (await connection.request({"op": "release", "owner": n}))[0]["sandboxes"] for n in gone
            }
        finally:
            await connection.close()
        return Reclaimed({name: count for name, count in ended.items() if count})

    async def create(self, spec: SandboxSpec | None = None) -> RemoteBox:
        """Starts a sandbox.

        Raises:
            RefusedError: The node has no room.
        """
        data = asdict(spec or SandboxSpec())
        reply, _ = await self._connection.request({"op": "create", "backend": self.backend, "spec": data})
        return RemoteBox(self._connection, reply["box"])

    async def pool(self, spec: SandboxSpec | None = None, size: int = 1) -> Pool:
        """Starts `size` sandboxes that stateless calls share."""
        boxes = await asyncio.gather(*(self.create(spec) for _ in range(size)))
        return Pool(self, spec or SandboxSpec(), list(boxes))

    async def close(self, *, release: bool = True) -> None:
        """Disconnects; with `release` the owner's sandboxes end now instead of with the lease."""
        with contextlib.suppress(SandboxError):
            if release:
                await self._connection.request({"op": "release", "owner": self.owner})
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class RemoteBox:
    """A sandbox on a node; fulfils `sandbox.base.Sandbox`."""

    def __init__(self, connection: Connection, box_id: str):
        self._connection, self.id = connection, box_id

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str = "/work",
        output_limit: int = 1 << 20,
    ) -> ExecResult:
        """Runs a shell line (str) or an argv. A timeout kills the whole process tree and is in the result."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        header = {"op": "exec", "argv": argv, "env": dict(env or {}), "cwd": cwd}
        return await self._run({**header, "timeout_s": timeout_s, "limit": output_limit}, stdin)

    async def python(
        self, source: str, *, stdin: bytes = b"", timeout_s: float = 10.0, output_limit: int = 1 << 16
    ) -> ExecResult:
        """Runs Python source in a fresh fork of the resident interpreter: milliseconds, no state kept."""
        code = source.encode()
        header = {"op": "python", "source_bytes": len(code), "cwd": "/work"}
        return await self._run({**header, "timeout_s": timeout_s, "limit": output_limit}, code + stdin)

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """Reads a file of at most `limit` bytes."""
        return (await self._connection.request({"op": "read", "box": self.id, "path": path, "limit": limit}))[
            1
        ]

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file, making its parent folders."""
        await self._connection.request({"op": "write", "box": self.id, "path": path, "mode": mode}, data)

    async def close(self) -> None:
        """Deletes the sandbox and everything in it."""
        with contextlib.suppress(LostError):
            await self._connection.request({"op": "close", "box": self.id})

    async def _run(self, command: Header, body: bytes) -> ExecResult:
        header, output = await self._connection.request(
            {"op": "run", "box": self.id, "command": command}, body
        )
        cut = header["stdout_bytes"]
        fields: dict[str, Any] = {
            k: header[k] for k in ("exit_code", "truncated", "timed_out", "oom", "duration_s")
        }
        return ExecResult(stdout=output[:cut], stderr=output[cut:], **fields)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Pool:
    """Sandboxes that serve the stateless calls of many trajectories; one that died is replaced."""

    def __init__(self, fleet: Fleet, spec: SandboxSpec, boxes: list[RemoteBox]):
        self._fleet, self._spec, self._boxes = fleet, spec, boxes
        self._next = itertools.cycle(range(len(boxes)))
        self._replacing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[RemoteBox]:
        """Lends a sandbox; a call that finds it dead fails as infrastructure, and the next gets a new one."""
        place = next(self._next)
        box = self._boxes[place]
        try:
            yield box
        except SandboxError:
            async with self._replacing:
                if self._boxes[place] is box:
                    await box.close()
                    self._boxes[place] = await self._fleet.create(self._spec)
            raise

    async def close(self) -> None:
        """Ends the pool's sandboxes."""
        await asyncio.gather(*(box.close() for box in self._boxes))


class Connection:
    """One stream to a node that carries many requests at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Header, bytes]]] = {}
        self._fault: SandboxError | None = None
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def open(cls, path: Path) -> Connection:
        """Connects to the socket of a node."""
        return cls(*await asyncio.open_unix_connection(path, limit=1 << 22))

    async def request(self, header: Header, body: bytes = b"") -> tuple[Header, bytes]:
        """Sends a request and returns its reply; a cancelled caller cancels it on the node.

        Raises:
            SandboxError: The node says so, or is gone.
        """
        if self._fault is not None:
            raise self._fault
        number = next(self._ids)
        reply: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            self._writer.write(encode({**header, "id": number}, body))
            await self._writer.drain()
            answer, data = await reply
        except asyncio.CancelledError:
            self._writer.write(encode({"op": "cancel", "target": number, "id": next(self._ids)}))
            raise
        except ConnectionError as error:
            raise LostError("the sandbox node is gone") from error
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer, data

    async def close(self) -> None:
        """Ends the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _receive(self) -> None:
        try:
            while True:
                header, body = await read_frame(self._reader)
                reply = self._waiting.get(header["id"])
                if reply is not None and not reply.done():
                    reply.set_result((header, body))
        except SandboxError as error:
            self._fault = LostError(f"the sandbox node is gone ({error})")
            for reply in self._waiting.values():
                if not reply.done():
                    reply.set_exception(self._fault)


async def _reach(state_dir: Path) -> Connection:
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(OSError):
        return await Connection.open(state_dir / SOCKET)
    with (state_dir / "node.lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            return await Connection.open(state_dir / SOCKET)
        process = _start_node(state_dir)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and process.poll() is None:
            await asyncio.sleep(0.02)
            with contextlib.suppress(OSError):
                return await Connection.open(state_dir / SOCKET)
    log = (state_dir / "node.log").read_text(errors="replace").strip().splitlines()
    raise InfrastructureError(f"the sandbox node does not start: {log[-1] if log else 'it left no message'}")


def _start_node(state_dir: Path) -> subprocess.Popen[bytes]:
    """Starts the node in a session of its own, so that no signal to the client reaches it."""
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": root}
    with (state_dir / "node.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "sandbox.node", str(state_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
