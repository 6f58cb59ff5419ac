"""One stream to a node that carries many requests at once, and how the node of this machine is reached."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sandbox.channel import Header, encode
from sandbox.errors import InfrastructureError, LostError, SandboxError, from_wire
from sandbox.frames import FrameProtocol
from sandbox.node import READY, SOCKET
from sandbox.versions import API, UNSAID, request_for, served

_PING_S, _SILENT_S = 10.0, 60.0
_TRIES, _AGAIN_S = 6, 0.05


class Link(Protocol):
    """Where the requests of a client go: the node of this machine, or a front."""

    async def request(
        self, header: Header, body: bytes = b"", sink: Callable[[int, bytes], None] | None = None
    ) -> tuple[Header, bytes]:
        """Sends a request and returns its reply; see `Connection.request`."""
        ...

    async def close(self) -> None:
        """Ends the connection."""
        ...


class Connection:
    """Requests of one client. A node that stays silent although asked for a sign of life counts as gone.

    `state_dir` is the state folder of the node, when it is this machine's.
    """

    def __init__(self, channel: FrameProtocol):
        self._channel = channel
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Header, bytes]]] = {}
        self._sinks: dict[int, Callable[[int, bytes], None]] = {}
        self._fault: SandboxError | None = None
        self._version = API
        self._heard = time.monotonic()
        self._watching = asyncio.create_task(self._watch())
        self.state_dir: Path | None = None
        channel.listen(self._take, self._lost)

    @classmethod
    async def open(cls, path: Path) -> Connection:
        """Connects to the socket of a node.

        Raises:
            OSError: Nobody listens there.
        """
        loop = asyncio.get_running_loop()
        connection = cls((await loop.create_unix_connection(FrameProtocol, str(path)))[1])
        connection.state_dir = path.parent
        return connection

    async def request(
        self, header: Header, body: bytes = b"", sink: Callable[[int, bytes], None] | None = None
    ) -> tuple[Header, bytes]:
        """Sends a request and returns its reply; a cancelled caller cancels it on the node.

        Args:
            header: The request.
            body: Bytes that go with it.
            sink: Takes output (0 of stdout, 1 of stderr) that comes ahead of the reply; must not wait.

        Raises:
            SandboxError: The node says so, or is gone.
        """
        if self._fault is not None:
            raise self._fault
        number = next(self._ids)
        asked = request_for(self._version, header)
        if header["op"] == "hello":
            asked = {**asked, "version": API}
        frame = encode({**asked, "id": number}, body)
        reply: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        if sink is not None:
            self._sinks[number] = sink
        try:
            self._channel.write(frame)
            answer, data = await reply
        except asyncio.CancelledError:
            self._channel.write(encode({"op": "cancel", "target": number, "id": next(self._ids)}))
            raise
        finally:
            self._waiting.pop(number, None)
            self._sinks.pop(number, None)
        if "error" in answer:
            raise from_wire(answer["error"])
        if header["op"] == "hello":
            self._version = served(answer.get("version", UNSAID))
        return answer, data

    @property
    def lost(self) -> bool:
        """Whether it has ended, and with it what its client had under way."""
        return self._fault is not None

    async def close(self) -> None:
        """Ends the connection."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._fail(LostError("the fleet was closed"))
        self._channel.close()
        await self._channel.wait_closed()

    def _take(self, header: Header, body: bytes) -> None:
        self._heard = time.monotonic()
        if "event" in header:
            self._pass_on(header, body)
            return
        reply = self._waiting.get(header["id"])
        if reply is not None and not reply.done():
            reply.set_result((header, body))

    def _lost(self, fault: SandboxError) -> None:
        self._fail(LostError(f"the sandbox node is gone ({fault})"))

    def _pass_on(self, header: Header, body: bytes) -> None:
        reply, sink = self._waiting.get(header["id"]), self._sinks.get(header["id"])
        if reply is None or sink is None or reply.done():
            return
        try:
            sink(header["event"], body)
        except (SandboxError, OSError) as error:
            self._channel.write(encode({"op": "cancel", "target": header["id"], "id": next(self._ids)}))
            reply.set_exception(error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            silent = time.monotonic() - self._heard
            if silent > _SILENT_S and self._waiting:
                self._fail(LostError(f"the sandbox node has been silent for {silent:.0f} s"))
            elif silent > _PING_S:
                self._channel.write(encode({"op": "ping", "id": next(self._ids)}))

    def _fail(self, fault: SandboxError) -> None:
        self._fault = self._fault or fault
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(self._fault)


async def greet(state_dir: Path, greeting: Header) -> tuple[Connection, Header]:
    """Connects to the node of a state folder, starting it when none answers; returns its reply to a greeting.

    A node that is just ending may still take a connection; the next try then finds or starts another one.

    Raises:
        InfrastructureError: It does not start.
        LostError: Each node that took the connection ended before it replied.
        SandboxError: What the node says to the greeting.
    """
    for attempt in range(_TRIES):
        connection = await _reach(state_dir)
        try:
            return connection, (await connection.request(greeting))[0]
        except LostError:
            await connection.close()
            if attempt == _TRIES - 1:
                raise
            await asyncio.sleep(_AGAIN_S * 2**attempt)
        except BaseException:
            await connection.close()
            raise
    raise AssertionError("unreachable")


async def _reach(state_dir: Path) -> Connection:
    with contextlib.suppress(OSError):
        return await Connection.open(state_dir / SOCKET)
    await asyncio.to_thread(_start, state_dir)
    try:
        return await Connection.open(state_dir / SOCKET)
    except OSError as error:
        raise InfrastructureError(f"the sandbox node ended at once; see {state_dir / 'node.log'}") from error


def _start(state_dir: Path) -> None:
    """Starts a node unless somebody else has meanwhile; it detaches itself and outlives this process."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (state_dir / "node.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _answers(state_dir / SOCKET):
            return
        root = str(Path(__file__).parent.parent)
        with (state_dir / "node.log").open("ab") as log:
            done = subprocess.run(
                [sys.executable, "-m", "sandbox.node", str(state_dir), "--detach"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": root},
                cwd=state_dir,
                check=False,
            )
    if done.stdout.decode() != READY:
        lines = (state_dir / "node.log").read_text(errors="replace").strip().splitlines()
        raise InfrastructureError(
            f"the sandbox node does not start: {lines[-1] if lines else 'it left no message'}"
        )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
