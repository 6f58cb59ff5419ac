"""The caller's end against servers that are older, broken, slow or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict

import pytest
from aiohttp import web

from sandbox.channel import Header, encode, read_frame
from sandbox.errors import (
    InfrastructureError,
    LostError,
    PolicyError,
    ProtocolError,
    SandboxError,
    to_wire,
)
from sandbox.types import SandboxSpec
from sandbox.versions import API
from sandbox.web import Caller, node_of
from sandbox.wire import TYPE, VERSION

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[Caller]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []
    callers: list[Caller] = []

    async def start(handler: Handler) -> Caller:
        app = web.Application()
        app.router.add_post("/call", handler)
        runner = web.AppRunner(app, handler_cancellation=True)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        callers.append(Caller(f"http://127.0.0.1:{runner.addresses[0][1]}/", "t" * 20))
        return callers[-1]

    yield start
    for caller in callers:
        await caller.close()
    for runner in runners:
        await runner.cleanup()


def frame(body: bytes, status: int = 200, version: int = API) -> web.Response:
    return web.Response(body=body, status=status, content_type=TYPE, headers={VERSION: str(version)})


async def test_a_server_one_version_behind_is_spoken_to_in_that(serve: Serve) -> None:
    spoken: list[tuple[str, Header]] = []

    async def old(request: web.Request) -> web.Response:
        header, _ = await read_frame(request.content)
        if request.headers[VERSION] != "2":
            return frame(
                encode({"error": {"type": "PolicyError", "message": "2 only", "reason": ""}}), 400, 2
            )
        spoken.append((request.headers[VERSION], header))
        return frame(encode({"box": "n.1"}), version=2)

    caller = await serve(old)
    create = {"op": "create", "backend": "auto", "spec": asdict(SandboxSpec(ttl_s=7.0))}
    for _ in range(2):
        assert await caller.request(create) == ({"box": "n.1"}, b"")
    assert [version for version, _ in spoken] == ["2", "2"]
    assert set(spoken[0][1]["spec"]) == {"image", "limits", "labels", "ttl_s", "journal"}
    with pytest.raises(PolicyError, match="version 2, without life_s"):
        await caller.request({**create, "spec": asdict(SandboxSpec(life_s=7.0))})
    for command in ({"op": "move"}, {"op": "read", "at": 0}, {"op": "start", "flow": True}):
        with pytest.raises(PolicyError, match="version 2, which has no"):
            await caller.request({"op": "run", "box": "n.1", "command": command})
    assert len(spoken) == 2


async def test_a_server_that_is_newer_says_so(serve: Serve) -> None:
    async def new(request: web.Request) -> web.Response:
        error = PolicyError(f"this is version {API + 2} of the interface and serves {API + 1} too")
        return frame(encode({"error": to_wire(error)}), 400, API + 2)

    with pytest.raises(PolicyError, match=f"version {API + 2}"):
        await (await serve(new)).request({"op": "ping"})


async def test_output_that_comes_ahead_and_signs_of_life(serve: Serve) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": TYPE, VERSION: str(API)})
        await response.prepare(request)
        for part in (
            encode({"event": 0}, b"a"),
            encode({"event": -1}),
            encode({"event": 1}, b"b"),
            encode({"x": 1}),
        ):
            for byte in (part[:3], part[3:]):
                await response.write(byte)
        return response

    heard: list[tuple[int, bytes]] = []
    reply, _ = await (await serve(stream)).request({"op": "run"}, b"", lambda *piece: heard.append(piece))
    assert (reply, heard) == ({"x": 1}, [(0, b"a"), (1, b"b")])


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (lambda: web.Response(text="<h1>Bad gateway</h1>", status=502), InfrastructureError),
        (lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), InfrastructureError),
        (lambda: frame(encode({"x": 1})[:-2]), LostError),
        (lambda: frame(b"\xff" * 40), ProtocolError),
        (lambda: frame(b""), LostError),
        (lambda: frame(encode({"error": {"type": "Unheard", "message": "m", "reason": ""}})), SandboxError),
    ],
)
async def test_answers_that_are_none(
    serve: Serve, response: Callable[[], web.Response], kind: type[SandboxError]
) -> None:
    async def broken(request: web.Request) -> web.Response:
        return response()

    with pytest.raises(kind):
        await (await serve(broken)).request({"op": "run"})


async def test_a_cancelled_caller_cancels_the_call_at_the_server(serve: Serve) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    call = asyncio.create_task((await serve(wait)).request({"op": "run"}))
    await begun.wait()
    call.cancel()
    async with asyncio.timeout(20):
        await cancelled.wait()


async def test_nobody_there_and_addresses_that_are_none() -> None:
    caller = Caller("http://127.0.0.1:1", "t" * 20)
    with pytest.raises(LostError, match="does not answer"):
        await caller.request({"op": "ping"})
    await caller.close()
    for url in ("fleet", "ftp://fleet", "http://"):
        with pytest.raises(PolicyError, match="at an http"):
            Caller(url, "t" * 20)
    with pytest.raises(PolicyError, match="wants a token"):
        Caller("http://fleet", "")


@pytest.mark.parametrize("name", ["", "box", ".box", "node."])
def test_an_id_that_names_no_node_is_lost(name: str) -> None:
    with pytest.raises(LostError, match="names no node"):
        node_of(name)
    assert node_of("node.boot-random") == "node"
