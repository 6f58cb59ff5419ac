"""Frames as they come: handed on in the same turn of the event loop in which their last byte was read.

A command passes client, node and agent and comes back. A task that waits for a reader would cost each of them
two more turns of its loop, so channels on sockets are protocols.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from sandbox.channel import MAX_BODY, SIZES, Header, check_sizes, decode
from sandbox.errors import LostError, SandboxError

Take = Callable[[Header, bytes], None]
Lost = Callable[[SandboxError], None]
Allowed = Callable[[], int]


def any_size() -> int:
    """Returns what a body may have where nothing smaller is agreed on."""
    return MAX_BODY


class FrameProtocol(asyncio.Protocol):
    """Frames on a socket. Nothing is read before `listen`."""

    def __init__(self, greet: Callable[[FrameProtocol], None] | None = None):
        self._greet = greet
        self._transport: asyncio.Transport | None = None
        self._received, self._held, self._over = bytearray(), False, False
        self._take: Take | None = None
        self._lost: Lost | None = None
        self._allowed: Allowed = any_size
        self._fault: SandboxError | None = None
        self._full: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.pause_reading()
        if self._greet is not None:
            self._greet(self)

    def listen(self, take: Take, lost: Lost, allowed: Allowed = any_size) -> None:
        """Begins to read.

        Args:
            take: Gets each frame; what it raises (SandboxError) ends the channel.
            lost: Gets, once, why no more frames come: LostError, ProtocolError or what `take` raised.
            allowed: Says how large a body may be, at the time when its size is known.
        """
        assert self._transport is not None
        self._take, self._lost, self._allowed = take, lost, allowed
        if self._fault is not None:
            lost(self._fault)
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._received += data
        if not self._held:
            self._hand_on()

    def _hand_on(self) -> None:
        assert self._take is not None
        received = self._received
        try:
            while len(received) >= SIZES.size and not self._held and self._fault is None:
                head, size = SIZES.unpack_from(received)
                check_sizes(head, size, self._allowed)
                start = SIZES.size + head
                if len(received) < start + size:
                    return
                with memoryview(received) as view:  # so that a body is copied once
                    text, body = bytes(view[SIZES.size : start]), bytes(view[start : start + size])
                del received[: start + size]
                self._take(decode(text), body)
        except SandboxError as error:
            self._end(error)

    def _end(self, fault: SandboxError) -> None:
        if self._fault is None:
            self._fault = fault
            self.close()
            if self._lost is not None:
                self._lost(fault)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop. What came before is handed on first."""
        self._over = True
        if not self._held:
            self._end(LostError("the other end closed the channel"))
        self.resume_writing()
        self._gone.set_result(None)

    def hold(self) -> None:
        """Has no frames handed on until `go_on`."""
        assert self._transport is not None
        self._held = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Hands frames on again."""
        assert self._transport is not None
        self._held = False
        self._hand_on()
        if self._held:
            return
        if self._over:
            self._end(LostError("the other end closed the channel"))
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Called by the loop."""
        self._full = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Called by the loop."""
        if self._full is not None:
            self._full.set_result(None)
            self._full = None

    def write(self, data: bytes) -> None:
        """Queues bytes; they are dropped once the channel has ended."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)

    async def drain(self) -> None:
        """Waits until the queue is short, or nobody is there to read it."""
        if self._full is not None:
            await asyncio.shield(self._full)

    def close(self) -> None:
        """Ends the channel."""
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self) -> None:
        """Returns when it has ended."""
        await asyncio.shield(self._gone)
