"""The way out, where a sandbox has one: a port on its own loopback, which the proxy outside listens on."""

from __future__ import annotations

import struct
from _socket import AF_INET, AF_UNIX, SCM_RIGHTS, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket

from .program import ENVIRONMENT

HOST, PORT, BACKLOG = "127.0.0.1", 3128, 64


def hand_over(door: str) -> None:
    """Makes a listener and hands it through the door, which is shut after that; tells commands of it."""
    listener, outside = socket(AF_INET, SOCK_STREAM), socket(AF_UNIX, SOCK_STREAM)
    listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    listener.bind((HOST, PORT))
    listener.listen(BACKLOG)
    outside.connect(door)
    outside.sendmsg([b"+"], [(SOL_SOCKET, SCM_RIGHTS, struct.pack("i", listener.fileno()))])
    listener.close()
    outside.close()
    for name in ("http_proxy", "https_proxy"):
        ENVIRONMENT[name] = ENVIRONMENT[name.upper()] = "http://" + HOST + ":" + str(PORT)
    ENVIRONMENT["no_proxy"] = ENVIRONMENT["NO_PROXY"] = "localhost,127.0.0.1,::1"
