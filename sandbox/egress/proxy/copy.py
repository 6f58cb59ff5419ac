"""The bytes of one connection: from the client and back, each with a limit of size and of time."""

from __future__ import annotations

import select
import socket
import time

from . import http, tls
from .http import Refused, Request

CHUNK = 65536
_LINGER_S, _LINGER_BYTES = 1.0, 1 << 18


class Client:
    """The sandbox's side of a connection."""

    def __init__(self, sock: socket.socket, bounds: dict[str, float]):
        self.sock, self.bounds = sock, bounds
        self.ahead, self.answered = b"", False
        self.deadline = time.monotonic() + bounds["head_s"]

    def head(self) -> bytes:
        """Returns the head of a request; what came behind it is in `ahead`.

        Raises:
            Refused: It is too large, or takes too long.
            EOFError: The client has gone.
        """
        data = bytearray()
        while (end := data.find(b"\r\n\r\n", max(0, len(data) - CHUNK - 3))) < 0:
            if len(data) > http.MAX_HEAD:
                raise Refused("too_large", "the head of the request is too large")
            if more := self.read():
                data += more
            elif data:
                raise Refused("malformed", "the request ends within its head")
            else:
                raise EOFError
        self.ahead = bytes(data[end + 4 :])
        return bytes(data[:end])

    def read(self) -> bytes:
        """Returns what comes next of what must be there by the deadline; nothing at the end.

        Raises:
            Refused: It does not come in time.
        """
        left = self.deadline - time.monotonic()
        try:
            self.sock.settimeout(max(left, 0.001))
            return self.sock.recv(CHUNK)
        except TimeoutError:
            raise Refused("timeout", "the request takes too long to come") from None

    def answer(self, status: str, reason: str, text: str) -> None:
        """Answers in place of the host, and lets the client read it."""
        self.answered = True
        body = f"{text}\n".encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        if reason:
            head += f"X-Tempering-Denied: {reason}\r\n"
        self.sock.settimeout(_LINGER_S)
        self.sock.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.sock.shutdown(socket.SHUT_WR)
        end, seen = time.monotonic() + _LINGER_S, 0
        while seen < _LINGER_BYTES and (left := end - time.monotonic()) > 0:
            self.sock.settimeout(left)
            if not (data := self.sock.recv(CHUNK)):
                return
            seen += len(data)


class Flow:
    """A client and the host that it speaks to."""

    def __init__(self, client: Client, upstream: socket.socket, bounds: dict[str, float], request: Request):
        self.client, self.upstream, self.bounds, self.request = client, upstream, bounds, request
        self.end = time.monotonic() + bounds["total_s"]
        self.room = {"request": bounds["request_bytes"], "response": bounds["response_bytes"]}
        upstream.setblocking(True)

    def exchange(self) -> None:
        """Sends the request with as much body as it announced, and copies the response until its end."""
        self.send(self.upstream, http.write(self.request))
        body, left = self.client.ahead, self.request.length
        self.client.deadline = self.end
        while left:
            piece = (body or self.client.read())[:left]
            if not piece:
                raise EOFError
            self.send(self.upstream, piece)
            body, left = b"", left - len(piece)
        while data := self.receive():
            self.take("response", len(data))
            self.client.answered = True
            self.send(self.client.sock, data)

    def receive(self) -> bytes:
        """Returns what the host sends next; nothing at its end, or when the client has gone."""
        poller = select.poll()
        poller.register(self.upstream, select.POLLIN)
        poller.register(self.client.sock, 0)
        ready = [fd for fd, _ in poller.poll(self.patience() * 1000)]
        if not ready:
            raise self.late()
        return b"" if self.client.sock.fileno() in ready else self.upstream.recv(CHUNK)

    def tunnel(self) -> None:
        """Copies both ways, once the client has named the host that the tunnel is for."""
        self.client.answered = True
        self.send(self.client.sock, b"HTTP/1.1 200 Connection established\r\n\r\n")
        hello = self.client.ahead
        self.client.deadline = time.monotonic() + self.bounds["head_s"]
        while (name := tls.server_name(hello)) is None:
            if not (more := self.client.read()):
                raise Refused("sni_mismatch", "no TLS greeting", self.request)
            hello += more
        if name != self.request.host:
            raise Refused("sni_mismatch", "the TLS greeting names another host", self.request)
        self.take("request", len(hello))
        self.send(self.upstream, hello)
        self.both()

    def both(self) -> None:
        """Copies in both directions until both have ended."""
        ways = {
            self.client.sock.fileno(): (self.client.sock, self.upstream, "request"),
            self.upstream.fileno(): (self.upstream, self.client.sock, "response"),
        }
        poller = select.poll()
        for fd in ways:
            poller.register(fd, select.POLLIN)
        while ways:
            ready = poller.poll(self.patience() * 1000)
            if not ready:
                raise self.late()
            for fd, _ in ready:
                source, target, way = ways[fd]
                data = source.recv(CHUNK)
                self.take(way, len(data))
                if data:
                    self.send(target, data)
                    continue
                poller.unregister(fd)
                del ways[fd]
                target.shutdown(socket.SHUT_WR)

    def send(self, sock: socket.socket, data: bytes) -> None:
        """Sends all of it."""
        sock.settimeout(self.patience())
        sock.sendall(data)

    def take(self, way: str, size: int) -> None:
        """Counts bytes of the request or the response."""
        self.room[way] -= size
        if self.room[way] < 0:
            raise Refused("too_large", f"the {way} is too large", self.request)

    def patience(self) -> float:
        """Returns how long to wait for the next bytes."""
        return max(min(self.bounds["idle_s"], self.end - time.monotonic()), 0.001)

    def late(self) -> Refused:
        """Returns what ends a connection for its time."""
        return Refused("timeout", "the connection took too long", self.request)
