"""Frames on a byte stream: a JSON header and a body, with sizes checked before anything is read.

A frame is `!II` (length of the header, length of the body), the header as JSON, and the body. The same frames
run between client and node and between node and resident agent; what comes from an agent is never trusted.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from sandbox.errors import LostError, ProtocolError

SIZES = struct.Struct("!II")
MAX_HEADER = 1 << 18
MAX_BODY = 64 << 20
Header = dict[str, Any]


class ByteReader(Protocol):
    """Where frames come from."""

    async def readexactly(self, n: int) -> bytes:
        """Reads exactly `n` bytes."""
        ...


def encode(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Returns a frame."""
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER or len(body) > MAX_BODY:
        raise ProtocolError(
            f"a frame carries at most {MAX_HEADER} bytes of header and {MAX_BODY} of body, "
            f"not {len(text)} and {len(body)}: split the data"
        )
    return SIZES.pack(len(text), len(body)) + text + body


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


async def read_frame(
    reader: ByteReader, allowed: Callable[[], int] = lambda: MAX_BODY
) -> tuple[Header, bytes]:
    """Reads one frame, whose body may be `allowed()` bytes long at the time when its size is known.

    Raises:
        LostError: The stream ended.
        ProtocolError: The frame is too large, or its header is not a JSON object.
    """
    try:
        head, size = SIZES.unpack(await reader.readexactly(SIZES.size))
        check_sizes(head, size, allowed)
        data = await reader.readexactly(head + size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise LostError("the other end closed the channel") from error
    return decode(data[:head]), data[head:]


def check_sizes(head: int, size: int, allowed: Callable[[], int]) -> None:
    """Returns when a frame of these sizes may come.

    Raises:
        ProtocolError: It is too large.
    """
    if head > MAX_HEADER or size > allowed():
        raise ProtocolError(f"a frame announces {head} bytes of header and {size} of body")


def decode(text: bytes) -> Header:
    """Returns a header.

    Raises:
        ProtocolError: It is not a JSON object.
    """
    try:
        header: object = _DECODER.decode(text.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a frame's header is not JSON") from error
    if not isinstance(header, dict):
        raise ProtocolError("a frame's header is not a JSON object")
    return cast("Header", header)
