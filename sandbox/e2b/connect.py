"""The Connect protocol, as far as E2B clients speak it: JSON messages, alone or in envelopes of a stream."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from typing import Any, cast

from aiohttp import web

from sandbox.e2b.status import BAD, SLOW, E2BError, said_inside
from sandbox.errors import SandboxError

Message = dict[str, Any]
MAX_MESSAGE = 8 << 20
BODY_S = 60.0
"""How long a request may take to arrive, a message of a stream of them too."""

_ENVELOPE = struct.Struct("!BI")
_LAST = 2
_UNARY, _STREAM = "application/json", "application/connect+json"


async def read_body(request: web.Request, most: int = MAX_MESSAGE) -> bytes:
    """Reads a body of at most `most` bytes.

    Raises:
        E2BError: It is longer, or slow.
    """
    if (request.content_length or 0) > most:
        raise E2BError(BAD, f"a request has at most {most} bytes")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.content.iter_any():
                data += piece
                if len(data) > most:
                    raise E2BError(BAD, f"a request has at most {most} bytes")
    except TimeoutError as error:
        raise E2BError(SLOW, f"the request did not arrive within {BODY_S:.0f} s") from error
    return bytes(data)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def parse(data: bytes) -> Message:
    """Returns a message.

    Raises:
        E2BError: It is no JSON object.
    """
    try:
        message: object = json.loads(data or b"{}", parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise E2BError(BAD, "the request is not JSON") from error
    if not isinstance(message, dict):
        raise E2BError(BAD, "the request is not a JSON object")
    return cast("Message", message)


def part(message: Message, name: str) -> Message:
    """Returns the object that a message has under a name; an empty one when it has none."""
    value: object = message.get(name)
    return cast("Message", value) if isinstance(value, dict) else {}


def check_type(request: web.Request, *, stream: bool) -> None:
    """Returns when a request is of the right kind.

    Raises:
        E2BError: It is of another.
    """
    wanted = _STREAM if stream else _UNARY
    if request.content_type != wanted:
        raise E2BError(BAD, f"this is called with {wanted}, not {request.content_type}")


def deadline_of(request: web.Request) -> float | None:
    """Returns the seconds that the caller gives a call, if it limits them.

    Raises:
        E2BError: They are no number.
    """
    text = request.headers.get("Connect-Timeout-Ms", "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise E2BError(BAD, "Connect-Timeout-Ms has at most ten digits")
    return int(text) / 1000


async def read_messages(request: web.Request, idle_s: float = BODY_S) -> AsyncIterator[Message]:
    """Yields the messages of a request, each as it comes.

    Raises:
        E2BError: One is of a wrong shape or too long, or none comes for a while.
    """
    while True:
        try:
            async with asyncio.timeout(idle_s):
                flags, size = _ENVELOPE.unpack(await request.content.readexactly(_ENVELOPE.size))
                if flags & ~_LAST or size > MAX_MESSAGE:
                    raise E2BError(BAD, f"an envelope is not compressed and has at most {MAX_MESSAGE} bytes")
                data = await request.content.readexactly(size)
        except TimeoutError as error:
            raise E2BError(SLOW, f"no message came for {idle_s:.0f} s") from error
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise E2BError(BAD, "the request ends within an envelope") from error
            return
        if flags & _LAST:
            return
        yield parse(data)


async def only_message(request: web.Request) -> Message:
    """Returns the one message of a request that is answered by a stream.

    Raises:
        E2BError: There is not one.
    """
    found = [message async for message in read_messages(request)]
    if len(found) != 1:
        raise E2BError(BAD, f"the request has {len(found)} messages and not one")
    return found[0]


async def answer_stream(
    request: web.Request, box: str, events: AsyncIterator[Message], deadline_s: float | None
) -> web.StreamResponse:
    """Answers with a stream; its end says whether all went well."""
    response = web.StreamResponse(headers={"Content-Type": _STREAM})
    await response.prepare(request)
    end: Message = {}
    try:
        async with asyncio.timeout(deadline_s):
            async for event in events:
                await response.write(envelope(event))
    except TimeoutError:
        end = _error(E2BError(SLOW, f"the call took longer than the {deadline_s} s that it was given"))
    except SandboxError as error:
        end = _error(said_inside(error, box))
    except E2BError as error:
        end = _error(error)
    await response.write(envelope(end, _LAST))
    await response.write_eof()
    return response


async def once(message: Message) -> AsyncIterator[Message]:
    """Yields one message."""
    yield message


def envelope(message: Message, flags: int = 0) -> bytes:
    """Returns a message of a stream."""
    data = json.dumps(message).encode()
    return _ENVELOPE.pack(flags, len(data)) + data


def _error(error: E2BError) -> Message:
    return {"error": {"code": error.status.code, "message": str(error)}}
