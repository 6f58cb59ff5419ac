"""The HTTP application: whose key it is, which request, and what came of it.

A key stands for a session. Keys are known by their hash, come and go while the endpoint runs, and one that
has gone is told from one that never was.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from aiohttp import web

from model.chat import ChatFormat
from rl.engines.native import EngineClosedError
from rl.rollout.faults import EpisodeEnded, Fault, Interrupted
from rl.serve.errors import ApiError
from rl.serve.replies import Reply
from rl.serve.requests import ChatRequest, parse_body, read_request
from rl.serve.session import Answer, Session
from sandbox.metrics import Metrics

MAX_BODY = 64 << 20
_KEEP_ALIVE_S = 15.0
_GONE = 4096
_THREAD_FROM = 1 << 20
"""Bytes of a body from which reading it leaves the event loop."""
_LOG = logging.getLogger("rl.serve")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ONLY: web.AppKey[Session] = web.AppKey("only", Session)
_SESSION: web.RequestKey[Session] = web.RequestKey("session", Session)
_Piece = tuple[int, dict[str, Any]]
_Pieces = asyncio.Queue[_Piece | None]


class Endpoint:
    """Serves chat completions of one model to whoever has a key.

    Args:
        model: Its name in requests.
        chat: The checkpoint's chat format.
        stats: Counters of the engine, for the metrics; `healthy` among them is what `/health` says.
        anyone: The session of callers without a key, on this machine alone; None: a key is needed.
    """

    def __init__(
        self,
        model: str,
        chat: ChatFormat,
        stats: Callable[[], dict[str, float]] = dict[str, float],
        anyone: Session | None = None,
    ) -> None:
        self.model, self._chat, self._anyone, self._stats = model, chat, anyone, stats
        self._closing = False
        self._started = int(time.time())
        self._keys: dict[bytes, Session] = {}
        self._gone: dict[bytes, None] = {}
        self.metrics = Metrics()
        count, seconds = self.metrics.counter, self.metrics.histogram
        self._requests = count("temper_serve_requests_total", "Requests by status.", "status")
        self._tokens = count("temper_serve_tokens_total", "Tokens of answered requests.", "kind")
        self._times = seconds("temper_serve_request_seconds", "How long answers took.", "stream")
        self._first = seconds("temper_serve_first_token_seconds", "Until the first piece of a stream.")
        self.running = 0
        self.metrics.gauge("temper_serve_running", "Requests being answered.", lambda: [((), self.running)])
        self.metrics.gauge(
            "temper_serve_engine",
            "Counters of the engine.",
            lambda: [((name,), value) for name, value in stats().items()],
            "name",
        )

    @contextmanager
    def key(self, session: Session, key: str = "") -> Iterator[str]:
        """Hands out a key for a session, or admits the one that is given; it goes at the end."""
        key = key or f"sk-temper-{secrets.token_urlsafe(24)}"
        digest = _digest(key)
        self._keys[digest] = session
        try:
            yield key
        finally:
            del self._keys[digest]
            self._gone[digest] = None
            while len(self._gone) > _GONE:
                del self._gone[next(iter(self._gone))]

    async def drain(self, seconds: float) -> None:
        """Takes no more requests and waits until those being answered are over, at most so long."""
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.running:  # noqa: ASYNC110  it is asked once, at the end
                    await asyncio.sleep(0.02)

    def application(self) -> web.Application:
        """Returns the routes."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        self._add_model(app)
        return app

    def for_one(self, session: Session) -> web.Application:
        """Returns the routes of the model alone, for one session's key and no other's."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app[_ONLY] = session
        self._add_model(app)
        return app

    def _add_model(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._one_model)
        app.router.add_post("/v1/chat/completions", self._chat_completions)

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        status = 500
        try:
            if request.path != "/health":
                request[_SESSION] = self._session_of(request)
            response = await handler(request)
            status = response.status
            return response
        except (ApiError, web.HTTPException, Fault, EpisodeEnded, Interrupted, EngineClosedError) as error:
            found = _api_error(error, request)
            status = found.status
            return web.json_response(found.body(), status=status)
        except asyncio.CancelledError:
            status = 499
            raise
        except Exception:
            _LOG.exception("a request failed")
            message = "the server failed; its log says why"
            found = ApiError(message, status=500, kind="server_error")
            return web.json_response(found.body(), status=500)
        finally:
            self._requests.add(str(status))

    def _session_of(self, request: web.Request) -> Session:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        digest = _digest(key.strip())
        session = self._keys.get(digest) if kind.lower() == "bearer" else None
        only = request.app.get(_ONLY)
        if only is not None and session is not only:
            session = None
        elif session is None and self._anyone is not None:
            _check_local(request)
            session = self._anyone
        if session is not None:
            return session
        gone = digest in self._gone
        message = (
            "this key's sample has ended: an agent stops when its sample does"
            if gone
            else "the key is missing or wrong: send it as `Authorization: Bearer KEY` (api_key of the client)"
        )
        raise ApiError(message, status=401, code="invalid_api_key", kind="authentication_error")

    async def _health(self, request: web.Request) -> web.Response:
        healthy = self._stats().get("healthy", 1.0) > 0 and not self._closing
        return web.json_response({"ok": healthy}, status=200 if healthy else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics.text(), content_type="text/plain")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": self._started, "owned_by": "tempering"}

    def _check_model(self, name: str) -> None:
        if name != self.model:
            raise ApiError(
                f"there is no model {name[:80]!r} here: take {self.model!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        if self._closing:
            raise ApiError("the server is stopping: ask again later", status=503, kind="server_error")
        if request.content_type != "application/json":
            raise ApiError("send Content-Type: application/json", status=415, code="unsupported_media_type")
        data = await request.read()
        asked = await asyncio.to_thread(_read, data) if len(data) > _THREAD_FROM else _read(data)
        self._check_model(asked.model)
        started, self.running = time.monotonic(), self.running + 1
        try:
            reply = Reply(self.model, self._chat.tokenizer, asked.logprobs)
            if asked.stream:
                return await self._stream(request, asked, reply)
            answer = await request[_SESSION].answer(asked)
            self._count(answer)
            return web.json_response(reply.whole(answer))
        finally:
            self.running -= 1
            self._times.observe(time.monotonic() - started, str(asked.stream).lower())

    async def _stream(self, request: web.Request, asked: ChatRequest, reply: Reply) -> web.StreamResponse:
        """Server-sent events. What is wrong before the first token is an error like any other."""
        pieces: _Pieces = asyncio.Queue()
        session, started = request[_SESSION], time.monotonic()
        task = asyncio.create_task(session.answer(asked, lambda i, delta: pieces.put_nowait((i, delta))))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            first = await _next(pieces)
            if first is None:
                await task  # an error, or a turn without anything to show
            self._first.observe(time.monotonic() - started)
            response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
            response.content_type = "text/event-stream"
            await response.prepare(request)
            for index in range(asked.n):
                await _send(response, reply.chunk(index, {"role": "assistant", "content": ""}))
            await self._send_all(response, reply, first, pieces, task, asked)
            await response.write_eof()
            return response
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _send_all(
        self,
        response: web.StreamResponse,
        reply: Reply,
        piece: _Piece | None,
        pieces: _Pieces,
        task: asyncio.Task[Answer],
        asked: ChatRequest,
    ) -> None:
        while piece is not None:
            await _send(response, reply.chunk(*piece))
            piece = await _next(pieces, response)
        try:
            answer = await task
        except Exception as error:  # the status is sent; the stream says what happened
            await _send(response, _api_error(error, None).body())
            return
        self._count(answer)
        for end in reply.ends(answer, usage=asked.include_usage):
            await _send(response, end)
        await response.write(b"data: [DONE]\n\n")

    def _count(self, answer: Answer) -> None:
        self._tokens.add("prompt", by=answer.prompt_tokens)
        self._tokens.add("completion", by=answer.completion_tokens)


@asynccontextmanager
async def on_loopback(endpoint: Endpoint) -> AsyncIterator[str]:
    """Serves on a free port of this machine alone; yields the base URL for clients."""
    async with _running(endpoint.application()) as runner:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


@asynccontextmanager
async def on_socket(application: web.Application, sock: socket.socket) -> AsyncIterator[None]:
    """Serves on a socket that listens."""
    async with _running(application) as runner:
        await web.SockSite(runner, sock).start()
        yield


@asynccontextmanager
async def _running(application: web.Application) -> AsyncIterator[web.AppRunner]:
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


def _read(data: bytes) -> ChatRequest:
    try:
        return read_request(parse_body(data))
    except (RecursionError, UnicodeError) as error:
        raise ApiError(f"the request cannot be read: {error}", code="invalid_json") from error


async def _next(pieces: _Pieces, response: web.StreamResponse | None = None) -> _Piece | None:
    """The next piece; None when there are no more. Keeps a stream that says nothing alive."""
    while True:
        try:
            async with asyncio.timeout(_KEEP_ALIVE_S):
                return await pieces.get()
        except TimeoutError:
            if response is not None:
                await response.write(b": waiting\n\n")


async def _send(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(data, ensure_ascii=False).encode(errors="replace") + b"\n\n")


def _api_error(error: BaseException, request: web.Request | None) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(f"the body has more than {MAX_BODY} bytes", status=413, code="request_too_large")
    if isinstance(error, web.HTTPException):
        what = "" if request is None else f": {request.method} {request.path[:80]}"
        return ApiError(f"{error.reason}{what}; see /v1/models and /v1/chat/completions", status=error.status)
    if isinstance(error, EpisodeEnded):
        return ApiError(f"the sample has ended ({error.stop}): stop here", code="episode_ended")
    if isinstance(error, Interrupted | EngineClosedError):
        return ApiError("the engine ends: try again later", status=503, kind="server_error")
    return ApiError(str(error), status=500, kind="server_error")


def _check_local(request: web.Request) -> None:
    """Refuses what a web page elsewhere has a browser of this machine ask for."""
    name = (request.url.host or "").lower()
    if name not in ("127.0.0.1", "localhost", "::1"):
        raise ApiError(
            f"this server is for programs of its own machine, and was asked as {name[:80]!r}: take "
            "127.0.0.1 as its address, or serve with a token",
            status=403,
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
