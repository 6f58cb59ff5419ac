"""The host's side of one resident agent: many commands at once over its channel, no trust in its replies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox.channel import Header, encode
from sandbox.clocks import Clocks
from sandbox.errors import LostError, ProtocolError, SandboxError
from sandbox.frames import FrameProtocol

_LATE_S = 5.0
"""An agent that says nothing so long after a command's deadline counts as dead."""

STATE = 1 << 18
"""Room for the state of a session."""

Sink = Callable[[int, bytes], Awaitable[None]]
_NOTE = 128
"""Room for the note in place of dropped output."""

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "exit_code": (int, type(None)),
    "signal": (int, type(None)),
    "stdout_bytes": int,
    "stderr_bytes": int,
    "disk_full": bool,
    "truncated": bool,
    "timed_out": bool,
    "cancelled": bool,
    "dirty": bool,
    "duration_s": (int, float),
}
_ANY = (0, 1 << 40)
_RANGES = {"exit_code": (0, 255), "signal": (1, 64)}
"""What numbers may be; infinities and what is not a number are in no range."""


class Resident:
    """One agent. The first fault of the channel ends all waiting commands and, by `kill`, the sandbox.

    `explain` says more of a fault than the channel knows.
    """

    def __init__(
        self,
        channel: FrameProtocol,
        kill: Callable[[], Awaitable[None]],
        explain: Callable[[SandboxError], SandboxError] = lambda fault: fault,
        late_s: float = _LATE_S,
    ):
        self._channel, self._kill, self._explain = channel, kill, explain
        self._late_s = late_s
        self._ids, self._sequence = itertools.count(1), itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Header, bytes]]] = {}
        self._room: dict[int, int] = {}
        self._sinks: dict[int, tuple[Sink, list[int]]] = {}
        self.clocks = Clocks()
        self._cancelled: set[asyncio.Future[tuple[Header, bytes]]] = set()
        self._ending: asyncio.Task[None] | None = None
        self.fault: SandboxError | None = None
        self._passing: asyncio.Task[None] | None = None
        channel.listen(self._take, self._lost, lambda: max(self._room.values(), default=0))

    async def request(
        self, header: Header, body: bytes = b"", *, timeout_s: float, sink: Sink | None = None
    ) -> tuple[Header, bytes]:
        """Sends a request and returns the reply; a cancelled caller has its command killed.

        Args:
            header: The request.
            body: Bytes that go with it.
            timeout_s: When its answer is due; time in which the sandbox is paused does not count.
            sink: Takes the output that comes ahead of the reply: at most `limit` bytes a stream.

        Raises:
            LostError: The sandbox is gone or does not answer.
            ProtocolError: It answered out of shape, and was ended.
        """
        if self.fault is not None:
            raise self.fault
        number = next(self._ids)
        reply: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        limit = int(header.get("limit", 0))
        self._room[number] = 2 * (limit + _NOTE) + (STATE if header.get("state") else 0)
        if sink is not None:
            self._sinks[number] = (sink, [limit, limit])
        self.clocks.start(reply, timeout_s + self._late_s)
        try:
            self._channel.write(encode({**header, "id": number}, body))
            return await reply
        except TimeoutError:
            await self._end(LostError(f"the sandbox did not answer within {timeout_s + self._late_s:.0f} s"))
            assert self.fault is not None
            raise self.fault from None
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            self.clocks.stop(reply)
            if self._waiting.get(number) is reply:
                del self._waiting[number]
                self._sinks.pop(number, None)

    async def close(self) -> None:
        """Ends the sandbox; returns when it is gone."""
        await self._end(LostError("the sandbox was closed"))

    async def settled(self) -> None:
        """Returns when the commands of cancelled callers have ended; a sandbox that keeps one is ended."""
        if self._cancelled and (await asyncio.wait(self._cancelled, timeout=self._late_s))[1]:
            await self._end(LostError("a cancelled command did not end"))
        if self.fault is not None:
            raise self.fault

    def _cancel(self, number: int) -> None:
        """Has the agent end a command whose caller has gone; its reply is waited for by `settled`."""
        if self.fault is None and number in self._room:
            kill = next(self._ids)
            self._room[kill] = 0
            self._channel.write(encode({"op": "kill", "target": number, "id": kill}))
            late: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
            self._waiting[number] = late
            self._cancelled.add(late)
            late.add_done_callback(lambda done: self._forget(number, done))

    def _forget(self, number: int, reply: asyncio.Future[tuple[Header, bytes]]) -> None:
        self._waiting.pop(number, None)
        self._sinks.pop(number, None)
        self._cancelled.discard(reply)
        reply.exception()  # nobody waits for it

    def _take(self, header: Header, body: bytes) -> None:
        if "event" in header:
            self._pass_on(header, body)
        else:
            self._deliver(header, body)

    def _lost(self, fault: SandboxError) -> None:
        self._begin_end(LostError("the sandbox ended by itself") if isinstance(fault, LostError) else fault)

    def _pass_on(self, header: Header, body: bytes) -> None:
        number, which = header.get("id"), header["event"]
        if header.get("seq") != next(self._sequence):
            raise ProtocolError(f"output out of sequence: {header.get('seq')!r:.80}")
        if type(number) is not int or number not in self._sinks or type(which) is not int:
            raise ProtocolError("output of nothing that was asked for it")
        sink, left = self._sinks[number]
        if which not in (0, 1) or not 0 < len(body) <= left[which]:
            raise ProtocolError("more output than was asked for")
        left[which] -= len(body)
        self._channel.hold()
        self._passing = asyncio.create_task(self._through(sink, which, body))

    async def _through(self, sink: Sink, which: int, body: bytes) -> None:
        """Hands output to its reader, for whom the rest of what the agent says waits."""
        try:
            await sink(which, body)
        finally:
            self._channel.go_on()

    def _deliver(self, header: Header, body: bytes) -> None:
        number = header.get("id")
        if type(number) is not int or self._room.pop(number, None) is None:
            raise ProtocolError("a reply to nothing that was asked")
        if header.get("seq") != next(self._sequence):
            raise ProtocolError(f"a reply out of sequence: {header.get('seq')!r:.80}")
        reply = self._waiting.get(number)
        if reply is not None and not reply.done():
            reply.set_result((header, body))

    async def _end(self, fault: SandboxError) -> None:
        await asyncio.shield(self._begin_end(fault))

    def _begin_end(self, fault: SandboxError) -> asyncio.Task[None]:
        if self._ending is None:
            self.fault = self._explain(fault)
            self._ending = asyncio.create_task(self._finish(self.fault))
        return self._ending

    async def _finish(self, fault: SandboxError) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(fault)
        await self._kill()
        self._channel.close()


def check_result(header: Header, body: bytes, limit: int, extra: int = 0) -> Header:
    """Returns the reply to a command when it has the right shape and size.

    Raises:
        ProtocolError: It has not.
    """
    for name, kind in _FIELDS.items():
        value: Any = header.get(name, "missing")
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if wrong or not (value is None or _RANGES.get(name, _ANY)[0] <= value <= _RANGES.get(name, _ANY)[1]):
            raise ProtocolError(f"a reply whose {name} is {value!r:.80}")
    out, err = header["stdout_bytes"], header["stderr_bytes"]
    if out < 0 or err < 0 or out + err > len(body) or max(out, err) > limit + _NOTE:
        raise ProtocolError(f"a reply of {out} and {err} bytes to a command limited to {limit}")
    if len(body) - out - err > extra:
        raise ProtocolError(f"a reply with {len(body) - out - err} bytes more than its outputs")
    return header
