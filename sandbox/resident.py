"""The host's side of one resident agent: many commands at once over its channel, no trust in its replies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from sandbox.channel import ByteReader, Header, encode, read_frame
from sandbox.errors import LostError, ProtocolError, SandboxError

_LATE_S = 5.0
"""An agent that says nothing so long after a command's deadline counts as dead."""

_NOTE = 128
"""Room for the note in place of dropped output."""

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "exit_code": (int, type(None)),
    "stdout_bytes": int,
    "truncated": bool,
    "timed_out": bool,
    "cancelled": bool,
    "dirty": bool,
    "duration_s": (int, float),
}


class ByteWriter(Protocol):
    """Where frames go."""

    def write(self, data: bytes) -> None:
        """Queues bytes."""
        ...

    async def drain(self) -> None:
        """Waits until the queue is short."""
        ...


class Resident:
    """One agent. `kill` ends its sandbox; the first fault of the channel ends all waiting commands."""

    def __init__(self, reader: ByteReader, writer: ByteWriter, kill: Callable[[], Awaitable[None]]):
        self._reader, self._writer, self._kill = reader, writer, kill
        self._ids, self._sequence = itertools.count(1), itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Header, bytes]]] = {}
        self._room: dict[int, int] = {}
        self._cancelled: set[asyncio.Future[tuple[Header, bytes]]] = set()
        self._ending: asyncio.Task[None] | None = None
        self.fault: SandboxError | None = None
        self._task = asyncio.create_task(self._receive())

    async def request(self, header: Header, body: bytes = b"", *, timeout_s: float) -> tuple[Header, bytes]:
        """Sends a request and returns the reply; a cancelled caller has its command killed.

        Raises:
            LostError: The sandbox is gone or does not answer.
            ProtocolError: It answered out of shape, and was ended.
        """
        if self.fault is not None:
            raise self.fault
        number = next(self._ids)
        reply: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        self._room[number] = 2 * (int(header.get("limit", 0)) + _NOTE)
        try:
            async with asyncio.timeout(timeout_s + _LATE_S):
                await self._send({**header, "id": number}, body)
                return await asyncio.shield(reply)
        except TimeoutError:
            del self._waiting[number]
            await self._end(LostError(f"the sandbox did not answer within {timeout_s + _LATE_S:.0f} s"))
            assert self.fault is not None
            raise self.fault from None
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            if reply not in self._cancelled:
                self._waiting.pop(number, None)

    async def close(self) -> None:
        """Ends the sandbox; returns when it is gone."""
        await self._end(LostError("the sandbox was closed"))

    async def settled(self) -> None:
        """Returns when the commands of cancelled callers have ended; a sandbox that keeps one is ended."""
        if self._cancelled and (await asyncio.wait(self._cancelled, timeout=_LATE_S))[1]:
            await self._end(LostError("a cancelled command did not end"))
        if self.fault is not None:
            raise self.fault

    def _cancel(self, number: int) -> None:
        if self.fault is None and number in self._room:
            kill = next(self._ids)
            self._room[kill] = 0
            self._writer.write(encode({"op": "kill", "target": number, "id": kill}))
            reply = self._waiting[number]
            self._cancelled.add(reply)
            reply.add_done_callback(lambda done: self._forget(number, done))

    def _forget(self, number: int, reply: asyncio.Future[tuple[Header, bytes]]) -> None:
        self._waiting.pop(number, None)
        self._cancelled.discard(reply)
        reply.exception()  # nobody waits for it

    async def _send(self, header: Header, body: bytes) -> None:
        try:
            self._writer.write(encode(header, body))
            await self._writer.drain()
        except OSError as error:
            await self._end(LostError(f"the sandbox is gone ({error})"))

    async def _receive(self) -> None:
        try:
            while True:
                header, body = await read_frame(self._reader, lambda: max(self._room.values(), default=0))
                self._deliver(header, body)
        except LostError:
            await self._end(LostError("the sandbox ended by itself"))
        except ProtocolError as error:
            await self._end(error)

    def _deliver(self, header: Header, body: bytes) -> None:
        number = header.get("id")
        if type(number) is not int or self._room.pop(number, None) is None:
            raise ProtocolError("a reply to nothing that was asked")
        if header.get("seq") != next(self._sequence):
            raise ProtocolError(f"a reply out of sequence: {header.get('seq')!r}")
        reply = self._waiting.get(number)
        if reply is not None and not reply.done():
            reply.set_result((header, body))

    async def _end(self, fault: SandboxError) -> None:
        if self._ending is None:
            self.fault = fault
            self._ending = asyncio.create_task(self._finish(fault))
        await asyncio.shield(self._ending)

    async def _finish(self, fault: SandboxError) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(fault)
        await self._kill()
        self._task.cancel()


def check_result(header: Header, body: bytes, limit: int) -> Header:
    """Returns the reply to a command when it has the right shape and size.

    Raises:
        ProtocolError: It has not.
    """
    for name, kind in _FIELDS.items():
        value: Any = header.get(name, "missing")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ProtocolError(f"a reply whose {name} is {value!r}")
    if not 0 <= header["stdout_bytes"] <= len(body) or len(body) > 2 * (limit + _NOTE):
        raise ProtocolError(f"a reply of {len(body)} bytes to a command limited to {limit}")
    return header
