"""The proxy of one sandbox: reads requests, asks the connector for a socket each, and copies bytes.

It decides nothing: where a request may go, the connector says, which alone can connect. All that it holds are
its control socket, the listener in the sandbox that it was handed, and the connections of that sandbox. On
the control socket go JSON messages:

    proxy -> node   {"ready": true}   {"ask": n, "method", "host", "port"}   {"deny": reason, "method", ...}
    node -> proxy   {"ask": n, "denied": reason}   {"ask": n, "failed": what}
                    {"ask": n, "patient": whether its silence has no bound but that of all time} with a socket
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time

from . import http, jail
from .copy import Client, Flow
from .http import Refused, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

MAX_MESSAGE, ANSWER_S, REFUSAL_S = 2048, 60.0, 1.0
_STATUS = {"malformed": "400 Bad Request", "too_large": "413 Content Too Large", "timeout": "408 Timeout"}


class Answer:
    """What the connector says to one question, when it has come."""

    __slots__ = ("come", "message", "sock")

    def __init__(self) -> None:
        self.come = threading.Event()
        self.message: dict[str, Any] = {}
        self.sock: socket.socket | None = None


class Proxy:
    """The main thread accepts and hears the connector; each connection has a thread of its own."""

    def __init__(self, control: socket.socket, bounds: dict[str, float]):
        self.control, self.bounds = control, bounds
        self.lock = threading.Lock()
        self.answers: dict[int, Answer] = {}
        self.asked = self.active = 0

    def serve(self, door: socket.socket) -> NoReturn:
        """Takes the listener that comes through the door, and serves it until the node is gone."""
        listener = self.listener(door)
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(listener, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self.control.fileno():
                    self.hear()
                else:
                    self.accept(listener)

    def listener(self, door: socket.socket) -> socket.socket:
        """Returns the listening socket that the sandbox's agent hands over, once."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(door, select.POLLIN)
        while door.fileno() not in [fd for fd, _ in poller.poll()]:
            self.hear()
        agent = door.accept()[0]
        agent.settimeout(10)
        _, fds, _, _ = socket.recv_fds(agent, 1, 1)
        agent.close()
        door.close()
        listener = socket.socket(fileno=fds[0])
        listener.setblocking(False)
        return listener

    def hear(self) -> None:
        """Takes a message of the connector; without it there is nothing to live for."""
        data, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, 1)
        if not data:
            os._exit(0)
        message = json.loads(data)
        with self.lock:
            answer = self.answers.pop(message["ask"], None)
        sock = socket.socket(fileno=fds[0]) if fds else None
        if answer is not None:
            answer.message, answer.sock = message, sock
            answer.come.set()
        elif sock is not None:
            hang_up(sock)

    def accept(self, listener: socket.socket) -> None:
        """Gives a connection its thread."""
        try:
            sock = listener.accept()[0]
        except OSError:  # gone again, or out of descriptors for a moment
            time.sleep(0.001)
            return
        with self.lock:
            full = self.active >= self.bounds["connections"]
            self.active += not full
        if full:
            self.report("connections", None)
            sock.close()
            return
        try:
            threading.Thread(target=self.attend, args=(sock,), daemon=True).start()
        except RuntimeError:
            sock.close()
            with self.lock:
                self.active -= 1

    def attend(self, sock: socket.socket) -> None:
        """Serves one connection; whatever goes wrong with it ends it alone."""
        try:
            client = Client(sock, self.bounds)
            try:
                self.pass_on(client)
            except Refused as refused:
                self.report(refused.reason, refused.request)
                if not client.answered:
                    status = _STATUS.get(refused.reason, "403 Forbidden")
                    client.answer(status, refused.reason, f"this is not allowed: {refused}")
            except (OSError, EOFError):
                pass
            finally:
                hang_up(sock)
        finally:
            with self.lock:
                self.active -= 1

    def pass_on(self, client: Client) -> None:
        """Reads a request, has it connected, and copies what follows."""
        request = http.parse(client.head())
        if request.length > self.bounds["request_bytes"]:
            raise Refused("too_large", "the body of the request is too large", request)
        upstream, patient = self.connect(client, request)
        if upstream is None:
            return
        try:
            bounds = {**self.bounds, "idle_s": self.bounds["total_s"]} if patient else self.bounds
            flow = Flow(client, upstream, bounds, request)
            if request.method == "CONNECT":
                flow.tunnel()
            else:
                flow.exchange()
        finally:
            hang_up(upstream)

    def connect(self, client: Client, request: Request) -> tuple[socket.socket | None, bool]:
        """Returns the socket that the connector gives for a request, and whether to be patient with it.

        Raises:
            Refused: It says that the phase does not allow it.
        """
        answer = Answer()
        with self.lock:
            self.asked += 1
            number = self.asked
            self.answers[number] = answer
        self.say({"ask": number, "method": request.method, "host": request.host, "port": request.port})
        if not answer.come.wait(ANSWER_S):
            with self.lock:
                self.answers.pop(number, None)
        if reason := answer.message.get("denied"):
            what = f"{request.method} {request.host}:{request.port} ({reason})"
            client.answer("403 Forbidden", reason, f"the network policy does not allow this: {what}")
            return None, False
        if answer.sock is None:
            what = answer.message.get("failed", "no answer in time")
            client.answer("502 Bad Gateway", "", f"{request.host} cannot be reached: {what}")
        return answer.sock, bool(answer.message.get("patient"))

    def report(self, reason: str, request: Request | None) -> None:
        """Tells the node what was refused here."""
        where: dict[str, Any] = {"method": "", "host": "", "port": 0}
        if request is not None:
            where = {"method": request.method, "host": request.host, "port": request.port}
        self.say({"deny": reason, **where})

    def say(self, message: dict[str, Any]) -> None:
        """Sends a message to the node."""
        self.control.sendall(json.dumps(message).encode())


def hang_up(sock: socket.socket) -> None:
    """Ends a connection in both directions, for all who hold it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def warm_up() -> None:
    """Does once what would need a file later: nothing can be opened any more."""
    "a.b".encode("ascii").decode("utf-8", "replace").encode("latin-1")
    json.loads(json.dumps({"a": [1, 0.5, None, True]}))
    thread = threading.Thread(target=time.monotonic)
    thread.start()
    thread.join()


def main() -> None:
    """Serves; arguments are the descriptors of control socket and door, bounds, and the filter of calls."""
    control, door = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    bounds = json.loads(sys.argv[3])
    threading.stack_size(256 << 10)
    warm_up()
    jail.confine(sys.argv[4], int(2 * bounds["connections"]) + 32)
    proxy = Proxy(control, bounds)
    proxy.say({"ready": True})
    proxy.serve(door)
