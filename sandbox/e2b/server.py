"""The E2B front as an HTTP application: what nobody may see without a key, and the routes behind it.

One address serves all: the control plane, which takes API keys, and the agents of all sandboxes, which are
told apart by the headers that name them. It keeps nothing: sandboxes, their times and their metadata are on
the nodes, which this front tells every few seconds that their owners are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping

from aiohttp import web

from sandbox.audit import Audit
from sandbox.e2b import filesystem, processes, transfer
from sandbox.e2b.access import Keys
from sandbox.e2b.connect import (
    Message,
    answer_stream,
    check_type,
    deadline_of,
    once,
    only_message,
    parse,
    read_body,
)
from sandbox.e2b.control import Control, unoffered
from sandbox.e2b.inside import Doors, Inside
from sandbox.e2b.link import LEASE_S, OWNER, Watched
from sandbox.e2b.status import BAD, GONE, SLOW, UNAUTHENTICATED, E2BError, refusal, said, said_inside
from sandbox.e2b.templates import Template
from sandbox.errors import SandboxError
from sandbox.server import Front
from sandbox.tokens import Principal
from sandbox.web import PRESENT_S

_AGENT = ("/process.Process/", "/filesystem.Filesystem/", "/files", "/health")
_LOG = logging.getLogger("sandbox.e2b")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_UNARY = {
    "/process.Process/List": processes.listing, "/process.Process/Update": processes.update,
    "/process.Process/SendInput": processes.send_input, "/process.Process/SendSignal": processes.send_signal,
    "/process.Process/CloseStdin": processes.close_stdin, "/filesystem.Filesystem/Stat": filesystem.look,
    "/filesystem.Filesystem/ListDir": filesystem.list_folder, "/filesystem.Filesystem/Move": filesystem.move,
    "/filesystem.Filesystem/MakeDir": filesystem.make_folder,
    "/filesystem.Filesystem/Remove": filesystem.remove,
    "/filesystem.Filesystem/CreateWatcher": filesystem.watcher,
    "/filesystem.Filesystem/GetWatcherEvents": filesystem.watcher,
    "/filesystem.Filesystem/RemoveWatcher": filesystem.watcher,
}  # fmt: skip
_STREAMS = {
    "/process.Process/Start": processes.start, "/process.Process/Connect": processes.connect,
    "/filesystem.Filesystem/WatchDir": filesystem.watch,
}  # fmt: skip


class E2BFront:
    """Serves E2B clients out of a front in the same process."""

    def __init__(
        self, front: Front, keys: Keys, watched: Watched, templates: Mapping[str, Template], audit: Audit
    ):
        self._front, self._keys, self._audit = front, keys, audit
        self._doors = Doors(keys, watched)
        self._control = Control(keys, watched, templates)

    def application(self) -> web.Application:
        """Returns the routes."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 20)
        self._control.add_routes(app.router)
        for path, unary in _UNARY.items():
            app.router.add_post(path, self._unary(unary))
        for path, stream in _STREAMS.items():
            app.router.add_post(path, self._stream(stream))
        app.router.add_post("/process.Process/StreamInput", self._input)
        app.router.add_get("/files", self._inside(transfer.download), allow_head=False)
        app.router.add_post("/files", self._inside(transfer.upload))
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{rest:.*}", unoffered)
        return app

    async def tend(self) -> None:
        """Says every few seconds that the owners of the sandboxes are there, whoever made them."""
        while True:
            with _told():
                await self._stay()
            await asyncio.sleep(PRESENT_S)

    async def _stay(self) -> None:
        everybody = Principal("e2b front", "", operator=True)
        reply, _ = await self._front.act(everybody, {"op": "owners"}, b"", _drop)
        for name, held in reply["owners"].items():
            project, _, owner = name.partition(":")
            if owner == OWNER and held["sandboxes"]:
                client = {"owner": OWNER, "lease_s": LEASE_S}
                header = {"op": "present", "nodes": held["nodes"], "client": client}
                with _told():
                    await self._front.act(Principal("e2b front", project), header, b"", _drop)

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        agent = request.path.startswith(_AGENT)
        rpc = request.content_type.startswith("application/") and request.path.startswith(_AGENT[:2])
        try:
            if not agent:
                self._keys.caller(request.headers.get("X-API-Key", ""))
            elif not request.headers.get("X-Access-Token"):
                raise E2BError(UNAUTHENTICATED, "this needs the access token (X-Access-Token) of the sandbox")
            else:
                self._keys.holder(
                    request.headers["X-Access-Token"], request.headers.get("E2b-Sandbox-Id", "")
                )
            return await handler(request)
        except E2BError as error:
            wrong = error
        except SandboxError as error:
            wrong = said_inside(error, request.headers.get("E2b-Sandbox-Id", "")) if agent else said(error)
        except (KeyError, TypeError, ValueError, AttributeError):
            _LOG.exception("%s %s failed", request.method, request.path)
            wrong = E2BError(BAD, "the request has a wrong shape")
        if wrong.status is UNAUTHENTICATED:
            self._audit.write(event="denied", peer=request.remote, path=request.path[:200])
        return refusal(wrong, rpc=rpc)

    def _inside(self, handler: Callable[[Inside, web.Request], Awaitable[web.StreamResponse]]) -> _Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            return await handler(await self._doors.open(request), request)

        return serve

    def _unary(self, handler: Callable[..., Awaitable[dict[str, object]]]) -> _Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            check_type(request, stream=False)
            inside, message = await self._doors.open(request), parse(await read_body(request))
            return web.json_response(await handler(inside, request, message))

        return serve

    def _stream(self, handler: Callable[..., AsyncIterator[Message]]) -> _Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            check_type(request, stream=True)
            deadline_s, message = deadline_of(request), await only_message(request)
            inside = await self._doors.open(request)
            return await answer_stream(request, inside.box.id, handler(inside, request, message), deadline_s)

        return serve

    async def _input(self, request: web.Request) -> web.StreamResponse:
        check_type(request, stream=True)
        deadline_s, inside = deadline_of(request), await self._doors.open(request)
        # A client stops sending once an answer has begun: all of it is taken first.
        try:
            async with asyncio.timeout(deadline_s):
                said = await processes.stream_input(inside, request)
        except TimeoutError as error:
            raise E2BError(SLOW, f"the input took longer than the {deadline_s} s it was given") from error
        return await answer_stream(request, inside.box.id, once(said), None)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        inside = await self._doors.open(request)
        if (await inside.link.describe(inside.box.id))[0]["paused"]:
            raise E2BError(GONE, f"The sandbox {inside.box.id} was not found running: it is paused")
        return web.Response(status=204)


@contextlib.contextmanager
def _told() -> Generator[None]:
    try:
        yield
    except SandboxError as error:
        _LOG.warning("the nodes could not be told that this front lives: %s", error)


def _drop(which: int, data: bytes) -> None:
    """Takes output that nobody asked for."""
