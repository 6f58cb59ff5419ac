"""What front and node agent have in common as HTTP servers: tokens, versions, metrics, audit, addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from sandbox.audit import Audit, asked, outcome, owner_of
from sandbox.channel import Header
from sandbox.errors import PolicyError, ProtocolError, SandboxError
from sandbox.metrics import Metrics
from sandbox.tokens import Access, Principal
from sandbox.versions import API, reply_for
from sandbox.wire import MAX_REQUEST, VERSION, Sink, answer, read_call, refusal, version_of

Act = Callable[[Principal, Header, bytes, Sink], Awaitable[tuple[Header, bytes]]]
_QUIET = frozenset({"load", "present", "ping"})
"""Calls that programs make every few seconds; the audit log has them when they fail."""

_BODY_S = 120.0
_LOG = logging.getLogger("sandbox.serving")


@dataclass(frozen=True, slots=True)
class Bind:
    """Where to listen, and with which certificate. Beyond loopback only when `public` says so."""

    host: str = "127.0.0.1"
    port: int = 0
    public: bool = False
    certificate: Path | None = None
    key: Path | None = None

    def check(self) -> None:
        """Returns when it is allowed.

        Raises:
            PolicyError: It reaches beyond loopback, and nobody said that it may.
        """
        try:
            local = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            local = self.host == "localhost"
        if not local and not self.public:
            raise PolicyError(
                f"{self.host} can be reached from other machines: say --public if that is meant, "
                "and give a certificate (--tls-cert, --tls-key) unless the network is yours alone"
            )

    def tls(self) -> ssl.SSLContext | None:
        """Returns the TLS settings, if there is a certificate."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise PolicyError(f"the certificate {self.certificate} cannot be used: {error}") from error
        return context


class Shell:
    """An HTTP server around `act`: nothing reaches that without a token and a version that is served."""

    def __init__(
        self,
        kind: str,
        access: Access,
        act: Act,
        audit: Audit,
        operations: frozenset[str],
        *,
        health: Callable[[], Mapping[str, Any]] = dict[str, Any],
        probe: Access | None = None,
    ):
        """Makes a server.

        Args:
            kind: front or node, for the names of metrics.
            access: Who may call.
            act: Performs a call.
            audit: Where calls are written down.
            operations: What can be asked for.
            health: Says how it is: `ok`, and why.
            probe: Who may ask for that besides those who may call.
        """
        self._health_of, self._probe = health, probe
        self._access, self._act, self._audit, self._operations = access, act, audit, operations
        self.metrics = Metrics()
        prefix = f"temper_sandbox_{kind}"
        self._calls = self.metrics.counter(f"{prefix}_calls_total", "Calls by outcome.", "op", "outcome")
        self._times = self.metrics.histogram(f"{prefix}_call_seconds", "How long calls took.", "op")
        self._denied = self.metrics.counter(f"{prefix}_unauthorised_total", "Requests without a good token.")
        self._bytes = self.metrics.counter(f"{prefix}_bytes_total", "Bytes of bodies.", "direction")

    def application(self) -> web.Application:
        """Returns the routes."""
        app = web.Application(client_max_size=MAX_REQUEST, middlewares=[self._guard])
        app.router.add_post("/call", self._call)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        principal = self._access.principal(given)
        if principal is None and self._probe is not None and request.path == "/health":
            principal = self._probe.principal(given)
        if principal is None:
            self._denied.add()
            self._audit.write(event="denied", peer=request.remote, path=request.path[:200])
            denied = refusal(
                PolicyError("this needs a token that is known here: Authorization: Bearer ..."), 401
            )
            denied.force_close()
            return denied
        try:
            return await handler(request)
        except SandboxError as error:
            return refusal(error)

    def _who(self, request: web.Request) -> Principal:
        principal = self._access.principal(request.headers.get("Authorization", ""))
        assert principal is not None  # the guard has let it through
        return principal

    async def _call(self, request: web.Request) -> web.StreamResponse:
        try:
            version = version_of(request.headers)
        except PolicyError as error:
            return refusal(error, 400)
        try:
            async with asyncio.timeout(_BODY_S):
                header, body = await read_call(request)
        except TimeoutError as error:
            raise ProtocolError(f"the call did not arrive within {_BODY_S:.0f} s") from error
        perform = self.watched(self._who(request))

        async def spoken(header: Header, body: bytes, sink: Sink) -> tuple[Header, bytes]:
            reply, data = await perform(header, body, sink)
            return reply_for(version, reply), data

        return await answer(request, header, body, spoken)

    def watched(self, principal: Principal) -> Callable[..., Awaitable[tuple[Header, bytes]]]:
        """Returns what performs the calls of a principal, counted and written into the audit log."""

        async def perform(header: Header, body: bytes, sink: Sink) -> tuple[Header, bytes]:
            started, failure, reply, data = time.monotonic(), None, Header(), b""
            try:
                reply, data = await self._checked(principal, header, body, sink)
                return reply, data
            except BaseException as error:
                failure = error
                raise
            finally:
                self._account(principal, header, body, (reply, data), failure, time.monotonic() - started)

        return perform

    async def _checked(
        self, principal: Principal, header: Header, body: bytes, sink: Sink
    ) -> tuple[Header, bytes]:
        if header["op"] not in self._operations:
            raise PolicyError(f"there is no operation {str(header['op'])[:40]!r} here")
        try:
            return await self._act(principal, header, body, sink)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            _LOG.warning("the call %s has a wrong shape", header["op"], exc_info=error)
            raise PolicyError(f"the call has a wrong shape: {type(error).__name__}: {error}") from error

    def _account(
        self,
        principal: Principal,
        header: Header,
        body: bytes,
        answer: tuple[Header, bytes],
        failure: BaseException | None,
        seconds: float,
    ) -> None:
        reply, data = answer
        operation = header["op"] if header["op"] in self._operations else "unknown"
        ended = outcome(failure)
        self._calls.add(operation, ended["outcome"])
        self._times.observe(seconds, operation)
        self._bytes.add("in", by=len(body))
        self._bytes.add("out", by=len(data))
        if operation in _QUIET and failure is None:
            return
        who = {"principal": principal.name, "project": principal.project, "owner": owner_of(header)}
        made = {name: reply[name] for name in ("box", "snapshot") if name in reply}
        self._audit.write(
            event="call", op=operation, **who, **{**asked(header, body), **made}, **ended,
            bytes_out=len(data), seconds=round(seconds, 6),
        )  # fmt: skip

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        if not self._who(request).operator:
            raise PolicyError("metrics are for operators")
        return web.Response(text=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        about = {"api": API, "ok": True, **self._health_of()}
        status = 200 if about["ok"] else 503
        return web.json_response(about, status=status, headers={VERSION: str(API)})
