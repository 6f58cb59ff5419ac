"""The first message of a TLS client: to which host it wants to speak."""

from __future__ import annotations

from .http import Refused

MAX_HELLO = 32768
_HANDSHAKE, _CLIENT_HELLO, _HOST_NAME = 22, 1, 0
_SERVER_NAME, _HIDDEN = 0, frozenset((0xFE0D, 0xFFCE))
_WHAT = "not a TLS greeting that names its host once, in the open"


def server_name(data: bytes) -> str | None:
    """Returns the host that a greeting names; None while more of it is to come.

    Raises:
        Refused: It is not TLS, names no host or several, or hides (ECH) which one it means.
    """
    message = bytearray()
    while data:
        if data[0] != _HANDSHAKE or (len(data) > 1 and data[1] != 3):
            raise _refused()
        if len(data) < 5:
            return None
        size = int.from_bytes(data[3:5], "big")
        if not 0 < size <= 16384:
            raise _refused()
        if len(data) < 5 + size:
            return _too_long(len(message) + len(data))
        message += data[5 : 5 + size]
        data = data[5 + size :]
        if len(message) >= 4:
            length = int.from_bytes(message[1:4], "big")
            if message[0] != _CLIENT_HELLO or length > MAX_HELLO:
                raise _refused()
            if len(message) >= 4 + length:
                return _host(_Reader(bytes(message[4 : 4 + length])))
    return _too_long(len(message))


def _too_long(size: int) -> None:
    if size > MAX_HELLO:
        raise _refused()


class _Reader:
    """Bytes that are taken from the front; what is not there is refused."""

    def __init__(self, data: bytes):
        self.data = data

    def take(self, size: int) -> bytes:
        """Returns the next bytes."""
        if len(self.data) < size:
            raise _refused()
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def number(self, size: int) -> int:
        """Returns the next bytes as a number."""
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> _Reader:
        """Returns what a length of `size` bytes announces."""
        return _Reader(self.take(self.number(size)))


def _host(hello: _Reader) -> str:
    hello.take(34)  # version and random
    hello.block(1)  # session
    hello.block(2)  # cipher suites
    hello.block(1)  # compression
    extensions, names = hello.block(2), list[bytes]()
    while extensions.data:
        kind, content = extensions.number(2), extensions.block(2)
        if kind in _HIDDEN:
            raise _refused()
        if kind == _SERVER_NAME:
            listed = content.block(2)
            while listed.data:
                if listed.number(1) != _HOST_NAME:
                    raise _refused()
                names.append(listed.block(2).data)
    if len(names) != 1 or not names[0].isascii() or not names[0]:
        raise _refused()
    return names[0].decode().lower()


def _refused() -> Refused:
    return Refused("sni_mismatch", _WHAT)
