"""The one part that connects: it judges what a proxy asks for, and hands it a connected socket or a reason.

It runs in the node. A proxy has one control socket to it, which the kernel ties to the one sandbox; so no
proxy, also not one that was taken over, can ask in the name of another. Names are resolved here, checked
here, and connected to by the address that was checked. A copy of each socket stays here: with it the node
cuts what a new phase does not allow, and what outgrows its bounds, whatever the proxy does.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from sandbox.egress.addresses import Address, our_own, public
from sandbox.egress.dial import LOOKUPS, Unreachable, carried, connect, hang_up, look_up
from sandbox.egress.ledger import Ledger
from sandbox.egress.operator import Operator
from sandbox.policy import OWNER_HOST, DenialReason, Network, Rule, literal, numeric

MAX_MESSAGE = 2048
_KEEP_S, _SWEEP_S, _SEND_S = 30.0, 0.5, 10.0
_ADDRESSES, _MESSAGES_A_SECOND = 3, 500
MAX_HEAD_BYTES = 65536
"""Room for a request's head, or a greeting, beside its body."""

_REPORTED = frozenset(DenialReason) - {DenialReason.PROXY, DenialReason.PHASE}


class Broken(Exception):
    """A proxy that does not keep to the protocol."""


@dataclass(slots=True)
class _Live:
    """A connection that a proxy has."""

    sock: socket.socket
    host: str
    port: int
    method: str
    since: float = field(default_factory=time.monotonic)


class _Pace:
    """How fast a proxy is heard: one that talks without end must not have the node to itself."""

    def __init__(self) -> None:
        self._since, self._heard = 0.0, 0

    async def keep(self) -> None:
        """Gives way to others; waits when this second has had its messages."""
        now = time.monotonic()
        if now - self._since > 1.0:
            self._since, self._heard = now, 0
        self._heard += 1
        await asyncio.sleep(0.0 if self._heard < _MESSAGES_A_SECOND else self._since + 1.0 - now)


class Connector:
    """Answers the proxy of one sandbox. `owner` connects to the sandbox's owner."""

    def __init__(
        self,
        control: socket.socket,
        network: Network,
        operator: Operator,
        ledger: Ledger,
        owner: Callable[[], socket.socket],
    ):
        self._control, self._network, self._operator, self.ledger = control, network, operator, ledger
        self._owner = owner
        self._rules: tuple[Rule, ...] = network.rules(network.phase)
        self.phase = network.phase
        self._live: list[_Live] = []
        self._known: dict[str, tuple[float, tuple[Address, ...]]] = {}
        self._lookups = asyncio.Semaphore(LOOKUPS)
        self._looking: dict[str, asyncio.Lock] = {}
        self._places = asyncio.Semaphore(int(operator.bounds.connections))
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()

    async def serve(self) -> None:
        """Answers until the proxy is gone.

        Raises:
            Broken: It does not keep to the protocol.
        """
        loop = asyncio.get_running_loop()
        pace = _Pace()
        while data := await loop.sock_recv(self._control, MAX_MESSAGE + 1):
            await pace.keep()  # what is there already comes without giving way to others
            message = _message(data)
            if "ready" in message:
                self.ready.set()
            elif "deny" in message:
                reason = DenialReason(message["deny"])
                self.ledger.add(self.phase, reason, message["method"], message["host"], message["port"])
            else:
                await self._places.acquire()
                self._start(self._answer(message), self._places.release)

    def switch(self, phase: str) -> None:
        """Begins a phase; connections that it does not allow are cut before this returns."""
        self.phase, self._rules = phase, self._network.rules(phase)
        self._drop_ended()
        for live in [*self._live]:
            if not isinstance(self._judge(live.host, live.port, live.method), Rule):
                self._cut(live, DenialReason.PHASE)

    def close(self) -> None:
        """Cuts everything."""
        for task in [*self._tasks, *([self._sweeper] if self._sweeper else [])]:
            task.cancel()
        for live in self._live:
            hang_up(live.sock)
        self._live.clear()

    def _start(self, work: Awaitable[None], then: Callable[[], None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: (self._tasks.discard(done), then()))

    async def _answer(self, asked: dict[str, Any]) -> None:
        host, port, method = _plain(asked["host"]), asked["port"], asked["method"]
        reply: dict[str, Any] = {"ask": asked["ask"]}
        sock: socket.socket | None = None
        try:
            found = await self._open(host, port, method)
            if isinstance(found, DenialReason):
                self.ledger.add(self.phase, found, method, host, port)
                reply["denied"] = found
            else:
                sock = found
                reply["patient"] = host == OWNER_HOST  # a model may think for long before its first byte
        except Unreachable as error:
            reply["failed"] = str(error)
        if not await self._send(reply, sock) and sock is not None:
            self._live = [live for live in self._live if live.sock is not sock]
            hang_up(sock)

    async def _open(self, host: str, port: int, method: str) -> socket.socket | DenialReason:
        rule = self._judge(host, port, method)
        if isinstance(rule, DenialReason):
            return rule
        self._drop_ended()
        if len(self._live) >= self._operator.bounds.connections:
            return DenialReason.CONNECTIONS
        if host == OWNER_HOST:
            sock = self._reach_owner()
        else:
            addresses = [one for one in await self._resolve(host) if self._may_be(one, port, rule)]
            if not addresses:
                return DenialReason.PRIVATE
            sock = await connect(addresses[:_ADDRESSES], port)
        if not isinstance(self._judge(host, port, method), Rule):  # the phase has changed meanwhile
            sock.close()
            return DenialReason.PHASE
        self._live.append(_Live(sock, host, port, method))
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep())
        return sock

    def _reach_owner(self) -> socket.socket:
        try:
            return self._owner()
        except OSError as error:
            raise Unreachable("its owner does not listen now") from error

    def _judge(self, host: str, port: int, method: str) -> Rule | DenialReason:
        named = [rule for rule in self._rules if rule.host == host]
        there = [rule for rule in named if rule.port == port]
        if not named:
            return DenialReason.ADDRESS if numeric(host) else DenialReason.HOST
        if not there:
            return DenialReason.PORT
        return next((rule for rule in there if method in rule.methods), DenialReason.METHOD)

    def _may_be(self, address: Address, port: int, rule: Rule) -> bool:
        if public(address) and not our_own(address, port):
            return True
        return rule.private and self._operator.opens(address, port)

    async def _resolve(self, host: str) -> tuple[Address, ...]:
        """Returns the addresses of a name that a rule has: nothing else is ever looked up."""
        if (address := literal(host) or self._operator.names.get(host)) is not None:
            return (address,)
        async with self._looking.setdefault(host, asyncio.Lock()):
            until, addresses = self._known.get(host, (0.0, ()))
            if time.monotonic() >= until:
                addresses = await look_up(host, self._lookups)
                self._known[host] = time.monotonic() + _KEEP_S, addresses
        if not addresses:
            raise Unreachable("its name is not known")
        return addresses

    async def _send(self, reply: dict[str, Any], sock: socket.socket | None) -> bool:
        """Sends a reply, with the socket unless that has been cut meanwhile; returns whether it went."""
        deadline = time.monotonic() + _SEND_S
        while time.monotonic() < deadline:
            if sock is not None and sock.fileno() < 0:
                reply, sock = {**reply, "denied": DenialReason.PHASE}, None
            try:
                fds = [sock.fileno()] if sock is not None else []
                socket.send_fds(self._control, [json.dumps(reply).encode()], fds)
                return True
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError:
                return False
        return False

    async def _sweep(self) -> None:
        """Lets go of what has ended, and cuts what lives or carries too much, while there is something."""
        bounds = self._operator.bounds
        while self._live:
            await asyncio.sleep(_SWEEP_S)
            self._drop_ended()
            for live in [*self._live]:
                sent, received = carried(live.sock)
                most = bounds.request_bytes + MAX_HEAD_BYTES
                if sent > most or received > bounds.response_bytes:
                    self._cut(live, DenialReason.TOO_LARGE)
                elif time.monotonic() - live.since > bounds.total_s + _SWEEP_S:
                    self._cut(live, DenialReason.TIMEOUT)

    def _drop_ended(self) -> None:
        poller = select.poll()
        for live in self._live:
            poller.register(live.sock, 0)
        ended = {fd for fd, _ in poller.poll(0)}
        for live in [live for live in self._live if live.sock.fileno() in ended]:
            self._live.remove(live)
            hang_up(live.sock)

    def _cut(self, live: _Live, reason: DenialReason) -> None:
        self._live.remove(live)
        hang_up(live.sock)
        self.ledger.add(self.phase, reason, live.method, live.host, live.port)


def _message(data: bytes) -> dict[str, Any]:
    """Returns a message of a proxy, which may be hostile, when it has one of the three shapes."""
    try:
        message: object = json.loads(data) if len(data) <= MAX_MESSAGE else None
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict):
        known = cast("dict[str, Any]", message)
        if known.get("ready") is True and len(known) == 1:
            return known
        if (
            len(known) == 4
            and isinstance(known.get("host"), str)
            and isinstance(known.get("method"), str)
            and type(known.get("port")) is int
            and 0 <= known["port"] < 65536
            and (type(known.get("ask")) is int or str(known.get("deny")) in _REPORTED)
        ):
            return known
    raise Broken("a message out of shape")


def _plain(host: str) -> str:
    address = literal(host)
    return address.compressed if address is not None else host
