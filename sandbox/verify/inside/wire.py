"""Messages between the trusted parent and the process of the candidate: a length, and so much JSON."""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from typing import Any, cast

sys.set_int_max_str_digits(100_000)
LENGTH = struct.Struct("!I")
MAX_MESSAGE = 4 << 20


class WireError(ValueError):
    """What came is no message."""


def send(connection: socket.socket, value: Any) -> None:
    """Sends a value of JSON."""
    data = json.dumps(value).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Returns the next message.

    Raises:
        WireError: It is none.
        EOFError: The other side is gone.
        TimeoutError: It did not come by `deadline`, of `time.monotonic`.
    """
    (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size, deadline))
    if size > MAX_MESSAGE:
        raise WireError(f"a message of {size} bytes")
    try:
        value: object = json.loads(_exactly(connection, size, deadline))
    except (ValueError, RecursionError) as error:
        raise WireError("a message that is no JSON") from error
    if not isinstance(value, dict):
        raise WireError("a message that is no object")
    return cast("dict[str, Any]", value)


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        try:
            piece = connection.recv(min(size - len(data), 1 << 16))
        except ConnectionError as error:
            raise EOFError from error
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
