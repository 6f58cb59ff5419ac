"""Strangers and clients of bad will against a front and its E2B side, on the bytes of their connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from sandbox.audit import Audit, asked, owner_of
from sandbox.channel import Header
from sandbox.e2b.access import Keys
from sandbox.e2b.server import E2BFront
from sandbox.e2b.status import E2BError
from sandbox.e2b.templates import read_templates
from sandbox.errors import LostError, PolicyError
from sandbox.listening import Gate, Listener, listen
from sandbox.server import Front
from sandbox.serving import Bind, Shell
from sandbox.session import spec_from
from sandbox.shapes import check_command
from sandbox.tokens import Access, Principal, fresh_token, own_token, token_access
from sandbox.types import SandboxSpec
from sandbox.versions import API
from sandbox.web import Caller
from sandbox.wire import TYPE, VERSION, Sink

TOKEN, STRANGER = fresh_token()[0], fresh_token()[0]
ANSWER_S = 60.0


@dataclass
class Served:
    """A front without nodes, and its E2B side, in this process."""

    ports: dict[str, int]
    gates: dict[str, Gate]
    keys: Keys
    audit: Path

    async def say(self, name: str, data: bytes, *, end: bool = True) -> bytes:
        """Sends bytes and returns all that comes until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[name])
        try:
            writer.write(data)
            if end:
                writer.write_eof()
            async with asyncio.timeout(ANSWER_S):
                return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def ask(
        self, name: str, request: str, headers: dict[str, str], body: bytes = b""
    ) -> tuple[int, bytes]:
        """Sends a request and returns the status and the body of its answer."""
        lines = {"Host": "x", "Connection": "close", "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        answer = await self.say(name, f"{request} HTTP/1.1\r\n{head}\r\n".encode() + body, end=False)
        head, _, rest = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), rest

    async def call(self, header: object) -> tuple[int, bytes]:
        return await self.ask("front", "POST /call", CALL, frame(json.dumps(header).encode()))


def frame(text: bytes, body: bytes = b"") -> bytes:
    return len(text).to_bytes(4, "big") + len(body).to_bytes(4, "big") + text + body


CALL = {"Authorization": f"Bearer {TOKEN}", "Content-Type": TYPE, VERSION: str(API)}
KEY = {"X-API-Key": TOKEN}
CLIENT = {"owner": "o", "lease_s": 1.0}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "nodes").write_text("")
    access = token_access(TOKEN, "operator")
    front, audit, keys = (
        Front(tmp_path / "nodes", access, "n" * 20),
        Audit(tmp_path / "audit"),
        Keys(access, "s"),
    )
    shell = Shell("front", access, front.act, audit, front.operations)
    e2b = E2BFront(front, keys, shell.watched, read_templates(None), audit)
    await front.start()
    ports, gates = dict[str, int](), dict[str, Gate]()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(front.close)
        stack.callback(audit.close)
        for name, app in (("front", shell.application()), ("e2b", e2b.application())):
            url, gates[name] = await listen(Listener(name, app, Bind()), stack, 8, silent_s=0.5)
            ports[name] = int(url.rpartition(":")[2])
        yield Served(ports, gates, keys, tmp_path / "audit")


@pytest.mark.parametrize(
    ("name", "request_line", "headers"),
    [
        ("front", "POST /call", {}),
        ("front", "POST /call", {"Authorization": f"Bearer {STRANGER}"}),
        ("front", "POST /call", {"Authorization": f"Basic {TOKEN}"}),
        ("front", "GET /metrics", {}),
        ("front", "GET /nothing", {}),
        ("e2b", "GET /sandboxes", {}),
        ("e2b", "GET /sandboxes", {"X-API-Key": STRANGER}),
        ("e2b", "GET /sandboxes", {"Authorization": f"Bearer {TOKEN}"}),
        ("e2b", "GET /nothing", {}),
        ("e2b", "GET /health", KEY),
        ("e2b", "GET /files?path=/etc/passwd&signature=v1_x", {"E2b-Sandbox-Id": "n.1"}),
        ("e2b", "POST /process.Process/Start", {"E2b-Sandbox-Id": "n.1", "X-Access-Token": TOKEN}),
        ("e2b", "POST /filesystem.Filesystem/Stat", {"X-Access-Token": "x.\xe9"}),
    ],
)
async def test_strangers_learn_nothing(
    served: Served, name: str, request_line: str, headers: dict[str, str]
) -> None:
    status, body = await served.ask(name, request_line, headers)
    assert status == 401, body
    assert TOKEN.encode() not in body
    assert STRANGER not in served.audit.read_text()


async def test_a_stranger_is_let_go_of_at_once(served: Served) -> None:
    """Whatever else it would send, and however it sends it."""
    for head in (
        b"Content-Length: 999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ):
        for name in ("front", "e2b"):
            answer = await served.say(name, b"POST /call HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n", end=False)
            assert b" 401 " in answer.splitlines()[0]


async def test_connections_that_say_nothing_are_cut(served: Served) -> None:
    gate = asyncio.create_task(served.gates["front"].tend())
    for begun in (b"", b"POST /call HTT", b"POST /call HTTP/1.1\r\nHost: x\r\nX-Slow: "):
        with contextlib.suppress(ConnectionError):
            assert await served.say("front", begun, end=False) == b""
    gate.cancel()


async def test_silent_connections_give_way_to_those_who_are_known(served: Served) -> None:
    """More of them than there may be of all: whoever has a token is served all the same."""
    gate = asyncio.create_task(served.gates["front"].tend())
    flood = [await asyncio.open_connection("127.0.0.1", served.ports["front"]) for _ in range(200)]
    assert (await served.call({"op": "ping"}))[0] == 200
    ends = await asyncio.wait_for(
        asyncio.gather(*(reader.read() for reader, _ in flood), return_exceptions=True), ANSWER_S
    )
    assert all(end == b"" or isinstance(end, ConnectionError) for end in ends)
    assert (await served.call({"op": "ping"}))[0] == 200
    gate.cancel()
    for _, writer in flood:
        writer.close()


async def test_the_oldest_silent_connections_go_first() -> None:
    """As many as are too many, and at once."""
    server = web.Server(served_nothing)
    gate = Gate(web.Application(), most=2, silent_s=3600.0)
    listening = await asyncio.get_running_loop().create_server(gate.open(server), "127.0.0.1", 0)
    streams = [await asyncio.open_connection(*listening.sockets[0].getsockname()[:2]) for _ in range(5)]
    async with asyncio.timeout(ANSWER_S):
        while len(server.connections) < 5:  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.01)
        gate.look()
        for reader, _ in streams[:3]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        while len(server.connections) > 2:  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.01)
    assert not any(reader.at_eof() for reader, _ in streams[3:])
    for _, writer in streams:
        writer.close()
    listening.close()
    await server.shutdown()


async def served_nothing(request: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError


async def test_who_is_known_keeps_its_connection(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.ports["front"])
    body = frame(b'{"op": "ping"}')
    head = "".join(
        f"{name}: {value}\r\n" for name, value in {**CALL, "Content-Length": str(len(body))}.items()
    )
    for _ in range(2):
        writer.write(f"POST /call HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + body)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), ANSWER_S)
        await reader.readuntil(b"{}")
        await asyncio.sleep(0.6)  # longer than a silent one has
        served.gates["front"].look()
    writer.close()


BAD = "HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + TOKEN + "\r\nX-API-Key: " + TOKEN + "\r\n"


@pytest.mark.parametrize(
    "smuggled",
    [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
        "Content-Length: +4\r\n\r\nabcd",
        "Content-Length: 4, 4\r\n\r\nabcd",
        "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        "Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        "Transfer-Encoding: identity, chunked, gzip\r\n\r\n0\r\n\r\n",
        "X : y\r\n\r\n",
        "X\x00Y: z\r\n\r\n",
        "X: y\nZ: a\rb\r\n\r\n",
        "X: " + "a" * 100_000 + "\r\n\r\n",
        "".join(f"X{number}: a\r\n" for number in range(20_000)) + "\r\n",
    ],
)
async def test_requests_that_two_servers_would_read_in_two_ways(served: Served, smuggled: str) -> None:
    """Nothing after them is taken for a second request, and floods of headers end the connection."""
    after = f"GET /health {BAD}Connection: close\r\n\r\n"
    for name, path in (("front", "/call"), ("e2b", "/sandboxes")):
        try:
            answer = await served.say(name, f"POST {path} {BAD}{smuggled}{after}".encode(), end=False)
        except ConnectionError:
            continue
        assert b" 400 " in answer.splitlines()[0], answer[:200]
        assert answer.count(b"HTTP/1.") == 1
    assert (await served.call({"op": "ping"}))[0] == 200


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b'"ping"', b"[" * 100_000, b'{"op": 1}', b'{"op": ["ping"]}', b"\xff\xfe",
        b'{"op": "ping", "x": NaN}', b'{"op": "ping", "x": -Infinity}', b'{"op": ' + b"9" * 5000 + b"}",
        b'{"op": "no such thing"}', b'{"op": "create"}', b'{"op": "create", "spec": 1, "backend": "auto"}',
        b'{"op": "run", "box": {"a": 1}, "client": {"owner": "o", "lease_s": 1}}',
        b'{"op": "run", "box": "../../x", "client": {"owner": "o", "lease_s": 1}}',
        b'{"op": "hello", "client": 5}', b'{"op": "hello", "client": {"owner": ""}, "backend": "auto"}',
        b'{"op": "hello", "client": {"owner": "other:project", "lease_s": 1}, "backend": "auto"}',
        b'{"op": "boxes", "client": {"owner": "o", "lease_s": 1e999}}',
        b'{"op": "boxes", "client": {"owner": "o", "lease_s": -1}}',
        b'{"op": "fork", "box": "n.1", "count": 1e999, "client": {"owner": "o", "lease_s": 1}}',
        b'{"op": "present", "nodes": 5, "client": {"owner": "o", "lease_s": 1}}',
        b'{"op": "release", "owner": {"a": 1}, "client": []}',
    ],
)  # fmt: skip
async def test_calls_of_a_wrong_shape_are_typed_errors(served: Served, text: bytes) -> None:
    served.audit.touch()
    status, body = await served.ask("front", "POST /call", CALL, frame(text))
    assert status in (200, 400, 403, 410), body
    assert status == 200 or b'"error"' in body
    assert len(served.audit.read_text()) < 100_000


async def test_frames_that_lie_of_their_size(served: Served) -> None:
    for body in (b"", b"\0" * 7, b"\xff" * 8, (1 << 30).to_bytes(4, "big") * 2, frame(b"{}")[:-1]):
        assert (await served.ask("front", "POST /call", CALL, body))[0] == 400
    assert (await served.ask("front", "POST /call", {**CALL, "Content-Type": "text/plain"}, b"{}"))[0] == 400


@pytest.mark.parametrize(
    ("request_line", "body"),
    [
        ("POST /sandboxes", b"{"), ("POST /sandboxes", b"[]"), ("POST /sandboxes", b"[" * 100_000),
        ("POST /v2/sandboxes", b'{"timeout": NaN}'), ("POST /v2/sandboxes", b'{"timeout": "300"}'),
        ("POST /v2/sandboxes", b'{"metadata": {"a": 1}}'), ("POST /v2/sandboxes", b'{"envVars": [1]}'),
        ("POST /v2/sandboxes", b" " * 300_000), ("GET /v2/sandboxes?limit=-1", b""),
        ("GET /v2/sandboxes?nextToken=1e9", b""), ("GET /v2/sandboxes?order=random", b""),
        ("GET /v2/sandboxes?limit=" + "9" * 5000, b""),
        ("POST /v2/sandboxes", b'{"templateID": {"a": 1}}'),
        ("GET /sandboxes/..%2f..%2fhealth", b""), ("GET /sandboxes/n.1%00", b""), ("GET /sandboxes/%ff", b""),
        ("GET /../files", b""), ("GET //files", b""), ("PUT /sandboxes/n.1/network", b"{}"),
        ("GET /sandboxes/n.1/metrics", b""), ("POST /sandboxes/n.1/fork", b"{}"), ("TRACE /sandboxes", b""),
        ("DELETE /templates/base", b""),
    ],
)  # fmt: skip
async def test_e2b_requests_of_a_wrong_shape_are_errors(
    served: Served, request_line: str, body: bytes
) -> None:
    status, answer = await served.ask("e2b", request_line, KEY, body)
    assert status in (400, 401, 404, 405, 501), (status, answer)
    assert b"Traceback" not in answer


def test_a_sandbox_s_key_opens_that_sandbox_for_whom_it_was_made() -> None:
    alice, bob = Principal("alice", "lab/a"), Principal("bob", "lab/b")
    access = Access(((b"a", alice), (b"b", bob)), {})
    keys, others = Keys(access, "secret"), Keys(access, "another")
    key = keys.make(alice, "n.1")
    assert keys.holder(key, "n.1") == alice
    name, _, signature = key.partition(".")
    stolen = keys.make(bob, "n.1").partition(".")[0]
    wrong = (
        "",
        ".",
        "x",
        name,
        f"{stolen}.{signature}",
        f"{name}.{signature[:-1]}",
        f"{name}.\xe9",
        key + "0",
    )
    for guess, box in [(key, "n.2"), (key, ""), *((guess, "n.1") for guess in wrong)]:
        with pytest.raises(E2BError, match="access token"):
            keys.holder(guess, box)
    with pytest.raises(E2BError):
        others.holder(key, "n.1")
    with pytest.raises(E2BError):
        Keys(Access(((b"b", bob),), {}), "secret").holder(key, "n.1")  # alice's token was taken away


@pytest.mark.parametrize(
    "fields",
    [
        {"limits": {"memory_bytes": -1 << 40}}, {"limits": {"memory_bytes": 1.5}}, {"limits": {"cpus": 0}},
        {"limits": {"cpus": "1"}}, {"limits": {"pids": True}}, {"limits": {"cpus": float("nan")}},
        {"ttl_s": float("inf")}, {"ttl_s": -1}, {"life_s": "1"}, {"labels": {"a": 1}}, {"labels": [1]},
        {"labels": {str(number): "" for number in range(1000)}}, {"image": 5}, {"journal": 1},
    ],
)  # fmt: skip
def test_amounts_that_are_none(fields: dict[str, object]) -> None:
    """A limit below nothing would add to the room of its project."""
    plain = {"limits": {}, **fields}
    with pytest.raises(PolicyError):
        spec_from(plain)
    assert spec_from({"limits": {}}) == SandboxSpec()


@pytest.mark.parametrize(
    "command",
    [
        {"op": "exec", "argv": "ls", "env": {}}, {"op": "exec", "argv": [], "env": {}},
        {"op": "exec", "argv": ["a\0b"], "env": {}}, {"op": "exec", "argv": [1], "env": {}},
        {"op": "exec", "argv": ["a"]}, {"op": "exec", "argv": ["a"], "env": {"a=b": "c"}},
        {"op": "start", "argv": ["a"], "env": {}, "pty": [1]},
        {"op": "start", "argv": ["a"], "env": {}, "pty": 5},
        {"op": "start", "argv": ["a"], "env": {}, "pty": [1 << 20, 2]},
        {"op": "start", "argv": ["a"], "env": {}, "life_s": float("inf")},
        {"op": "read", "path": 5}, {"op": "read", "path": "a\0b"}, {"op": "read", "path": "a", "limit": -1},
        {"op": "read", "path": "a", "limit": 1 << 60}, {"op": "write", "path": "a", "mode": "7"},
        {"op": "exec", "argv": ["a"], "env": {}, "user": 1000.5}, {"op": "poll", "process": 1, "wait_s": "1"},
    ],
)  # fmt: skip
def test_commands_that_would_end_the_agent(command: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        check_command(command)
    check_command(
        {"op": "exec", "argv": ["true"], "env": {"a": "b"}, "limit": 5, "timeout_s": 1, "user": None}
    )


def test_the_audit_log_is_not_flooded() -> None:
    long = "x" * 200_000
    fields = asked(
        {"op": "run", "box": long, "key": [long], "command": {"op": long}, "spec": {"image": long}}, b""
    )
    assert all(len(str(value)) < 2000 for value in fields.values())
    assert owner_of({"client": 5, "owner": long}) == long[:1000]
    assert owner_of({"client": {"owner": ["a"]}}) == "['a']"


def test_a_full_disk_stops_the_audit_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(Path("/dev/full"))
    audit.write(event="call")
    audit.close()
    assert "the audit log /dev/full cannot be written: No space left on device" in caplog.text


def test_tokens_are_made_for_their_user_alone(tmp_path: Path) -> None:
    token = own_token(tmp_path / "token")
    assert own_token(tmp_path / "token") == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(PolicyError, match="others can read"):
        own_token(tmp_path / "token")
    (tmp_path / "empty").touch(0o600)
    with pytest.raises(PolicyError, match="holds no token"):
        own_token(tmp_path / "empty")
    with pytest.raises(PolicyError, match="cannot be made"):
        own_token(tmp_path / "nowhere" / "token")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_nobody_listens_beyond_loopback_by_accident(host: str) -> None:
    with pytest.raises(PolicyError, match="--public"):
        Bind(host).check()
    Bind("127.0.0.1").check()
    Bind("::1").check()


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    """Neither a client nor a front gives its token to a server that only says who it is."""
    made = [tmp_path / "cert.pem", tmp_path / "key.pem"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-out", str(made[0]), "-keyout", str(made[1]), "-days", "2", "-subj", "/CN=localhost"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    (tmp_path / "nodes").write_text("")
    access = token_access(TOKEN, "operator")
    front, audit = Front(tmp_path / "nodes", access, "n" * 20), Audit(tmp_path / "audit")
    shell = Shell("front", access, front.act, audit, front.operations)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(audit.close)
        bind = Bind("127.0.0.1", certificate=made[0], key=made[1])
        url, _ = await listen(Listener("front", shell.application(), bind), stack, 8)
        assert url.startswith("https://")
        caller = Caller(url.replace("127.0.0.1", "localhost"), TOKEN)
        with pytest.raises(LostError, match=r"(?i)certificate"):
            await caller.request({"op": "ping"})
        await caller.close()
    assert not (tmp_path / "audit").exists()


async def test_calls_that_are_cut_are_cancelled(tmp_path: Path) -> None:
    """In the middle of their body, and while their answer is awaited."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def act(who: Principal, header: Header, body: bytes, sink: Sink) -> tuple[Header, bytes]:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()
        return {}, b""

    audit = Audit(tmp_path / "audit")
    shell = Shell("front", token_access(TOKEN, "operator"), act, audit, frozenset({"run"}))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(audit.close)
        url, _ = await listen(Listener("front", shell.application(), Bind()), stack, 8)
        body = frame(b'{"op": "run"}', b"x" * 100)
        lines = {**CALL, "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        request = f"POST /call HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + body
        for data in (request[:-50], request):
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(data)
            await writer.drain()
            if data is request:
                await asyncio.wait_for(begun.wait(), ANSWER_S)
            writer.transport.abort()
            assert data is request or not begun.is_set()
        await asyncio.wait_for(ended.wait(), ANSWER_S)
