"""Servers side by side until they are told to stop, and connections that never say anything good.

A connection counts as silent until a request on it has shown a token that is known. Silent ones are cut
after some seconds, and the oldest of them at once when there are too many of all: strangers can hold no more
than that against those who are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from sandbox.errors import PolicyError
from sandbox.serving import Bind

SILENT_S = 10.0
_SPARE_FILES = 512
_MOST = 10_000
_LOOK_S = 0.25
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Listener:
    """An application, where it listens, and what it is called."""

    name: str
    app: web.Application
    bind: Bind


class Gate:
    """The connections of one application."""

    def __init__(self, app: web.Application, most: int, silent_s: float = SILENT_S):
        self._most, self._silent_s = most, silent_s
        self._silent: dict[asyncio.Protocol, float] = {}
        self._server: web.Server | None = None
        app.middlewares.append(self._watch)

    def open(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """Returns what makes the protocol of a new connection."""
        self._server = server

        def connect() -> asyncio.Protocol:
            protocol = server()
            self._silent[protocol] = time.monotonic()
            return protocol

        return connect

    @web.middleware
    async def _watch(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        # The innermost middleware: whoever comes here has passed the application's guard.
        self._silent.pop(request.protocol, None)
        return await handler(request)

    async def tend(self) -> None:
        """Cuts connections that have been silent for too long, and the oldest when there are too many."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Looks over all connections once."""
        assert self._server is not None
        now, living = time.monotonic(), self._server.connections
        over = len(living) - self._most
        known = {*living}
        for protocol, since in list(self._silent.items()):  # the oldest first
            if now - since > self._silent_s or over > 0:
                self._cut(protocol)
                over -= protocol in known
            elif protocol not in known and now - since > _LOOK_S * 8:
                del self._silent[protocol]

    def _cut(self, protocol: asyncio.Protocol) -> None:
        del self._silent[protocol]
        transport = getattr(protocol, "transport", None)
        if isinstance(transport, asyncio.Transport):
            transport.abort()


async def serve(
    listeners: Sequence[Listener], *tasks: Coroutine[Any, Any, None], ready: Callable[[str, str], None]
) -> None:
    """Serves until SIGTERM or SIGINT, with `tasks` beside it; `ready` hears of names and addresses.

    Raises:
        PolicyError: An address is not allowed, or taken.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    beside = [asyncio.create_task(task) for task in tasks]
    async with contextlib.AsyncExitStack() as stack:
        try:
            for listener in listeners:
                listener.bind.check()
                address, gate = await listen(listener, stack, _room() // len(listeners))
                beside.append(asyncio.create_task(gate.tend()))
                ready(listener.name, address)
            ended = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([ended, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {ended}:
                task.result()
                raise AssertionError("what runs beside a server does not end")
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


async def listen(
    listener: Listener, stack: contextlib.AsyncExitStack, most: int, silent_s: float = SILENT_S
) -> tuple[str, Gate]:
    """Listens until `stack` is left; returns the address and the gate, which wants to be tended.

    Raises:
        PolicyError: The address is taken.
    """
    gate, bind = Gate(listener.app, most, silent_s), listener.bind
    runner = web.AppRunner(
        listener.app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0, lingering_time=1.0
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    assert runner.server is not None
    tls = bind.tls()
    try:
        server = await asyncio.get_running_loop().create_server(
            gate.open(runner.server),
            bind.host,
            bind.port,
            ssl=tls,
            backlog=1024,
            ssl_handshake_timeout=silent_s if tls else None,
        )
    except OSError as error:
        raise PolicyError(f"{bind.host}:{bind.port} cannot be listened on: {error.strerror}") from error
    stack.callback(server.close)
    host, port = server.sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}", gate


def _room() -> int:
    """Returns how many connections there may be, having raised the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(min(hard - _SPARE_FILES, _MOST), 64)
