"""Looking names up and connecting, for a connector: in time, and to addresses that were checked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

from sandbox.egress.addresses import Address
from sandbox.policy import literal

LOOKUPS = 2
"""Names that are looked up at once for one sandbox: what does not answer holds up no other."""

_RESOLVE_S, _CONNECT_S = 10.0, 10.0
_TCP_INFO, _SENT_AND_RECEIVED, _SENT_AT = 11, struct.Struct("@QQ"), 120
_names = ThreadPoolExecutor(16, "names")


class Unreachable(Exception):
    """A place that is allowed and does not answer."""


async def look_up(host: str, place: asyncio.Semaphore) -> tuple[Address, ...]:
    """Returns the addresses of a name; holds its place until the thread that asks is free again."""

    def ask() -> list[str]:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(info[4][0]) for info in found))

    await place.acquire()
    asking = asyncio.get_running_loop().run_in_executor(_names, ask)
    asking.add_done_callback(lambda done: (place.release(), done.cancelled() or done.exception()))
    try:
        async with asyncio.timeout(_RESOLVE_S):
            texts = await asyncio.shield(asking)
    except (OSError, UnicodeError, TimeoutError):
        return ()
    return tuple(address for text in texts if (address := literal(text)) is not None)


async def connect(addresses: list[Address], port: int) -> socket.socket:
    """Returns a socket that is connected to the first address that answers.

    Raises:
        Unreachable: None does.
    """
    problem = "it does not answer"
    for address in addresses:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
            sock.connect_ex((str(address), port))  # only now the kernel counts it as connected, for good
            return sock
        except (OSError, TimeoutError) as error:
            sock.close()
            problem = getattr(error, "strerror", None) or problem
        except BaseException:
            sock.close()
            raise
    raise Unreachable(problem)


def carried(sock: socket.socket) -> tuple[int, int]:
    """Returns how many bytes a connection has carried, as the kernel counts: acknowledged, received."""
    with contextlib.suppress(OSError, struct.error):
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
        sent, received = _SENT_AND_RECEIVED.unpack_from(info, _SENT_AT)
        return sent, received
    return 0, 0


def hang_up(sock: socket.socket) -> None:
    """Ends a connection for all who hold it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
