"""The caller's end against servers that are older, broken, slow or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from sandbox.channel import encode
from sandbox.errors import InfrastructureError, LostError, PolicyError, ProtocolError, SandboxError
from sandbox.web import Caller, node_of
from sandbox.wire import API, TYPE, VERSION

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
    spoken: list[str] = []

    async def old(request: web.Request) -> web.Response:
        spoken.append(request.headers[VERSION])
        if request.headers[VERSION] != "1":
            return frame(
                encode({"error": {"type": "PolicyError", "message": "1 only", "reason": ""}}), 400, 1
            )
        reply = {"exit_code": 137, "truncated": False, "timed_out": False, "oom": False, "duration_s": 0.1}
        return frame(encode({**reply, "stdout_bytes": 1}, b"oe"), version=1)

    caller = await serve(old)
    for _ in range(2):
        reply, _ = await caller.request({"op": "run"})
        assert (reply["signal"], reply["disk_full"], reply["stderr_bytes"]) == (9, False, 1)
    assert spoken == ["2", "1", "1"]


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
