"""Frames over HTTP: how a request of the node's protocol travels between client, front and node agent.

A request is `POST /call` with one frame as its body. The answer is a stream of frames: output that comes
ahead, signs of life while nothing else does, and last the reply, or `{"error": ...}`. An answer that comes
soon has the HTTP status of its error; a later one has 200, as its frames have begun. A caller that goes away
cancels its request.

Every request names the version of this interface (`Temper-Api`). `versions.py` has what
another version means.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from sandbox.channel import MAX_BODY, MAX_HEADER, Header, encode, read_frame
from sandbox.errors import (
    FileError,
    InfrastructureError,
    LostError,
    PolicyError,
    ProtocolError,
    RefusedError,
    SandboxError,
    to_wire,
)
from sandbox.versions import API, served

VERSION, TYPE = "Temper-Api", "application/x-temper-frames"
BEAT_S = 10.0
"""The longest that an answer is silent."""

Sink = Callable[[int, bytes], None]
Perform = Callable[[Header, bytes, Sink], Awaitable[tuple[Header, bytes]]]
_BACKLOG = 32 << 20
_STATUS: tuple[tuple[type[SandboxError], int], ...] = (
    (RefusedError, 429),
    (PolicyError, 403),
    (LostError, 410),
    (ProtocolError, 400),
    (FileError, 422),
)
MAX_REQUEST = MAX_HEADER + MAX_BODY + 8


def version_of(headers: Mapping[str, str]) -> int:
    """Returns the version that a request speaks.

    Raises:
        PolicyError: It is not served here.
    """
    return served(headers.get(VERSION, ""))


async def read_call(request: web.Request) -> tuple[Header, bytes]:
    """Reads the frame of a request.

    Raises:
        ProtocolError: It is none.
    """
    if request.content_type != TYPE:
        raise ProtocolError(f"a call has the content type {TYPE}, not {request.content_type}")
    try:
        header, body = await read_frame(request.content)
    except LostError as error:
        raise ProtocolError("a call carries one whole frame") from error
    if not isinstance(header.get("op"), str):
        raise ProtocolError("a call names its operation")
    return header, body


def refusal(error: SandboxError, status: int = 0) -> web.Response:
    """Returns an error as an answer."""
    status = status or next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    body = encode({"error": to_wire(error)})
    return web.Response(body=body, status=status, content_type=TYPE, headers={VERSION: str(API)})


class _Events:
    """What a command says while it runs, until it has been sent on; a reader that is too slow is cut off."""

    def __init__(self) -> None:
        self.waiting: list[bytes] = []
        self.some = asyncio.Event()
        self._size = 0

    def put(self, which: int, data: bytes) -> None:
        """Takes a piece of output."""
        self._size += len(data)
        if self._size > _BACKLOG:
            raise InfrastructureError(f"the reader of a stream is more than {_BACKLOG >> 20} MiB behind")
        self.waiting.append(encode({"event": which}, data))
        self.some.set()

    def take(self) -> bytes:
        """Returns what there is."""
        data, self._size = b"".join(self.waiting), 0
        self.waiting.clear()
        self.some.clear()
        return data


async def answer(request: web.Request, header: Header, body: bytes, perform: Perform) -> web.StreamResponse:
    """Performs a call and answers it; when the caller goes away the call is cancelled."""
    events = _Events()
    work = asyncio.ensure_future(perform(header, body, events.put))
    try:
        if not await _until(work, events):
            return await _stream(request, work, events)
        try:
            reply, data = await work
        except SandboxError as error:
            return refusal(error)
        return web.Response(body=encode(reply, data), content_type=TYPE, headers={VERSION: str(API)})
    finally:
        if not work.done():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxError):
                await work


async def _until(work: asyncio.Future[tuple[Header, bytes]], events: _Events) -> bool:
    """Waits for the end, for output, or until a sign of life is due; returns whether the end has come."""
    some = asyncio.ensure_future(events.some.wait())
    try:
        await asyncio.wait([work, some], timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        some.cancel()
    return work.done() and not events.waiting


async def _stream(
    request: web.Request, work: asyncio.Future[tuple[Header, bytes]], events: _Events
) -> web.StreamResponse:
    response = web.StreamResponse(headers={VERSION: str(API), "Content-Type": TYPE})
    await response.prepare(request)
    while True:
        await response.write(events.take() or encode({"event": -1}))
        if await _until(work, events):
            break
    try:
        reply, data = await work
    except SandboxError as error:
        reply, data = {"error": to_wire(error)}, b""
    await response.write(encode(reply, data))
    await response.write_eof()
    return response
