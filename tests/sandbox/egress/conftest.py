"""A web server of the lab, and gates of sandboxes whose side this process plays itself."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.egress.doors import door_of
from sandbox.egress.gate import Gate
from sandbox.egress.operator import FILE
from sandbox.policy import Network, Rule


class Web:
    """A server that keeps what it is sent. `/endless` sends until it is cut off, `/silent` nothing."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.seen: list[bytes] = []
        self.connections = 0
        self.ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock = self._server.accept()[0]
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                data = sock.recv(65536)
                self.seen.append(data)
                if b"/silent" in data or data[:1] == b"\x16":
                    while more := sock.recv(65536):
                        self.seen[-1] += more
                elif b"/away" in data:
                    to = b"http://other.lab:%d/" % self.port
                    sock.sendall(b"HTTP/1.1 302 Found\r\nLocation: " + to + b"\r\nContent-Length: 0\r\n\r\n")
                elif b"/endless" in data:
                    sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    while True:
                        sock.sendall(b"x" * 1024)
                        self.ended.wait(0.01)
                else:
                    length = int(data.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or b"0")
                    while len(self.seen[-1].partition(b"\r\n\r\n")[2]) < length:
                        self.seen[-1] += sock.recv(65536)
                    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            except OSError:
                pass
            finally:
                if self.seen and b"/endless" in self.seen[-1]:
                    self.ended.set()

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.close()


@pytest.fixture
def lab(tmp_path: Path, web: Web) -> Callable[..., None]:
    """Writes the operator's file: names of the lab, the web server's address, and bounds."""

    def write(**bounds: float) -> None:
        names = {
            "files.lab": "127.0.0.1", "other.lab": "127.0.0.1", "meta.lab": "169.254.169.254",
            "inside.lab": "10.0.0.1", "mapped.lab": "::ffff:127.0.0.1", "public.lab": "192.0.2.1",
        }  # fmt: skip
        says = {"private": [f"127.0.0.1:{web.port}"], "names": names, "bounds": bounds}
        (tmp_path / FILE).write_text(json.dumps(says))

    write()
    return write


@pytest.fixture
async def enter(
    tmp_path: Path, lab: Callable[..., None], web: Web
) -> AsyncIterator[Callable[..., Awaitable[tuple[Gate, int]]]]:
    """Opens a gate and goes through its door as an agent does; gives the port that the proxy listens on."""
    opened: list[tuple[Gate, socket.socket]] = []

    async def enter(network: Network | None = None) -> tuple[Gate, int]:
        allowed = Rule("files.lab", web.port, private=True)
        network = network or Network({"setup": (allowed,), "solve": ()}, "setup")
        gate = Gate.open(tmp_path, f"box{len(opened)}", network)
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        opened.append((gate, listener))
        await gate.start()
        with socket.socket(socket.AF_UNIX) as agent:
            agent.connect(str(door_of(tmp_path, f"box{len(opened) - 1}")))
            socket.send_fds(agent, [b"+"], [listener.fileno()])
        return gate, listener.getsockname()[1]

    yield enter
    for gate, listener in opened:
        await gate.close()
        listener.close()


@pytest.fixture
def ask() -> Callable[[int, bytes], Awaitable[bytes]]:
    """Sends bytes to a port and returns all that comes back."""

    def talk(port: int, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            answer = b""
            try:
                sock.sendall(data)
                while piece := sock.recv(65536):
                    answer += piece
            except ConnectionError:
                return answer
            return answer

    async def ask(port: int, data: bytes) -> bytes:
        return await asyncio.to_thread(talk, port, data)

    return ask


@pytest.fixture
def reasons() -> Callable[[Gate], dict[str, Any]]:
    """Returns how often a gate has denied something, by reason."""
    return lambda gate: {str(reason): count for reason, count in gate.reasons.items()}
