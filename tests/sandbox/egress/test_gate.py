"""The gate of a sandbox, from the sandbox's side: what passes, what does not, and what each says."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.egress.gate import Gate
from sandbox.errors import PolicyError
from sandbox.policy import Denial, DenialReason, Network, Rule

Enter = Callable[..., Awaitable[tuple[Gate, int]]]
Ask = Callable[[int, bytes], Awaitable[bytes]]
Reasons = Callable[[Gate], dict[str, Any]]


def get(host: str, port: int, path: str = "/", header: str = "") -> bytes:
    return f"GET http://{host}:{port}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n{header}\r\n".encode()


def denied(answer: bytes) -> str:
    head = answer.partition(b"\r\n\r\n")[0]
    return head.partition(b"X-Tempering-Denied: ")[2].partition(b"\r\n")[0].decode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for is in other processes)
            await asyncio.sleep(0.01)


async def test_what_a_rule_names_is_reached(enter: Enter, ask: Ask, web: Any) -> None:
    gate, port = await enter()
    assert (await ask(port, get("files.lab", web.port, "/a?b=c"))).endswith(b"\r\n\r\nhello")
    assert web.seen[0].startswith(b"GET /a?b=c HTTP/1.1\r\nHost: files.lab:%d\r\n" % web.port)
    assert gate.denials() == []


async def test_every_way_around_a_rule_is_denied_and_counted(
    enter: Enter, ask: Ask, web: Any, reasons: Reasons
) -> None:
    at = web.port
    named = ("localhost", "meta.lab", "inside.lab", "mapped.lab", "public.lab")
    rules = (Rule("files.lab", at, private=True), Rule("127.0.0.1", 1), *(Rule(name, at) for name in named))
    gate, port = await enter(Network({"setup": (*rules, Rule("files.lab", 81, ("CONNECT",)))}, "setup"))
    other = b"\r\nHost: other.lab\r\n\r\n"
    attempts = {
        get("other.lab", at): "host",
        get("x" * 60 + ".files.lab", at): "host",
        get("files.lab", at + 1): "port",
        get("127.0.0.1", at): "port",
        get("127.0.0.2", at): "address",
        get("169.254.169.254", 80): "address",
        get("2130706433", at): "address",
        get("0x7f.1", at): "address",
        get("[::1]", at): "address",
        get("[::ffff:127.0.0.1]", at): "address",
        get("127.0.0.1", 1): "private",
        get("localhost", at): "private",
        get("meta.lab", at): "private",
        get("inside.lab", at): "private",
        get("mapped.lab", at): "private",
        get("public.lab", at): "private",
        get("files.lab", at).replace(b"GET", b"DELETE"): "method",
        b"CONNECT files.lab:%d HTTP/1.1\r\n\r\n" % at: "malformed",
        b"CONNECT files.lab:%d HTTP/1.0\r\n\r\n" % at: "method",
        b"CONNECT 10.0.0.1:443 HTTP/1.0\r\n\r\n": "address",
        b"GET http://files.lab:%d/ HTTP/1.1" % at + other: "host_mismatch",
        get("files.lab", at, header="X: " + "y" * 20_000 + "\r\n"): "too_large",
        b"\x16\x03\x01 nonsense\r\n\r\n": "malformed",
    }
    for attempt, reason in attempts.items():
        assert denied(await ask(port, attempt)) == reason, attempt[:60]
    counted = {reason: list(attempts.values()).count(reason) for reason in attempts.values()}
    await until(lambda: reasons(gate) == counted)
    assert web.connections == 0
    assert gate.denials()[0].phase == "setup"


async def test_an_address_that_the_operator_has_not_opened(enter: Enter, web: Any) -> None:
    with pytest.raises(PolicyError, match="has not opened"):
        await enter(Network({"setup": (Rule("127.0.0.1", web.port % 65535 + 1, private=True),)}, "setup"))
    with pytest.raises(PolicyError, match="has not opened"):
        await enter(Network({"setup": (), "solve": (Rule("meta.lab", private=True),)}, "setup"))


async def test_a_request_with_a_body_goes_out_with_no_byte_more(enter: Enter, ask: Ask, web: Any) -> None:
    rule = Rule("files.lab", web.port, ("POST",), private=True)
    gate, port = await enter(Network({"setup": (rule,)}, "setup"))
    head = get("files.lab", web.port, header="Content-Length: 4\r\n").replace(b"GET", b"POST")
    smuggled = b"GET http://other.lab/ HTTP/1.1\r\nHost: other.lab\r\n\r\n"
    assert (await ask(port, head + b"body" + smuggled)).endswith(b"hello")
    await until(lambda: bool(web.seen) and web.seen[0].endswith(b"\r\n\r\nbody"))
    assert b"other.lab" not in b"".join(web.seen)
    assert gate.denials() == []


async def test_a_new_phase_cuts_what_it_does_not_allow(enter: Enter, ask: Ask, web: Any) -> None:
    gate, port = await enter()
    endless = asyncio.create_task(ask(port, get("files.lab", web.port, "/endless")))
    await until(lambda: bool(web.seen))
    gate.switch("setup")
    assert not endless.done()
    gate.switch("solve")
    assert (await endless).startswith(b"HTTP/1.1 200 OK")
    assert await asyncio.to_thread(web.ended.wait, 30)
    (cut,) = gate.denials()
    assert (cut.reason, cut.phase, cut.host, cut.port) == (DenialReason.PHASE, "solve", "files.lab", web.port)
    assert denied(await ask(port, get("files.lab", web.port))) == "host"
    gate.switch("setup")
    assert (await ask(port, get("files.lab", web.port))).endswith(b"hello")
    with pytest.raises(PolicyError, match="did you mean 'solve'"):
        gate.switch("sovle")


async def test_a_sandbox_that_dawdles_holds_up_no_other(
    enter: Enter, ask: Ask, lab: Callable[..., None], web: Any, reasons: Reasons
) -> None:
    lab(connections=4, head_s=2.0)
    (slow, slow_port), (_, port) = await enter(), await enter()
    held = [socket.create_connection(("127.0.0.1", slow_port)) for _ in range(12)]
    for sock in held:
        sock.sendall(b"GET http://files.lab/ HT")
    await until(lambda: slow.reasons[DenialReason.CONNECTIONS] > 0)
    assert (await ask(port, get("files.lab", web.port))).endswith(b"hello")
    await until(lambda: slow.reasons[DenialReason.TIMEOUT] >= 4)
    for sock in held:
        sock.close()
    while not (await ask(slow_port, get("files.lab", web.port))).endswith(b"hello"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert set(reasons(slow)) == {"connections", "timeout"}


async def test_responses_and_silence_have_an_end(
    enter: Enter, ask: Ask, lab: Callable[..., None], web: Any
) -> None:
    lab(response_bytes=50_000, idle_s=0.5)
    gate, port = await enter()
    assert 40_000 < len(await ask(port, get("files.lab", web.port, "/endless"))) <= 50_000
    assert await asyncio.to_thread(web.ended.wait, 30)
    await until(lambda: gate.reasons[DenialReason.TOO_LARGE] == 1)
    assert denied(await ask(port, get("files.lab", web.port, "/silent"))) == "timeout"
    await until(lambda: gate.reasons[DenialReason.TIMEOUT] == 1)


def hello(host: str) -> bytes:
    outgoing = ssl.MemoryBIO()
    tunnel = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=host)
    with pytest.raises(ssl.SSLWantReadError):
        tunnel.do_handshake()
    return outgoing.read()


async def test_a_tunnel_is_for_tls_to_its_host(enter: Enter, ask: Ask, web: Any) -> None:
    rule = Rule("files.lab", web.port, ("CONNECT",), private=True)
    gate, port = await enter(Network({"setup": (rule,)}, "setup"))
    connect = f"CONNECT files.lab:{web.port} HTTP/1.1\r\nHost: files.lab:{web.port}\r\n\r\n".encode()
    for other in (hello("other.lab"), b"GET / HTTP/1.1\r\nHost: files.lab\r\n\r\n", b"SSH-2.0-x\r\n"):
        assert (await ask(port, connect + other)).startswith(b"HTTP/1.1 200")
    await until(lambda: gate.reasons == {DenialReason.SNI_MISMATCH: 3})
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(connect + hello("files.lab")[:100])
        sock.sendall(hello("files.lab")[100:] + b"secret")
        await until(lambda: any(data.endswith(b"secret") for data in web.seen))
    assert gate.reasons == {DenialReason.SNI_MISMATCH: 3}
    assert sum(bool(data) for data in web.seen) == 1
    assert denied(await ask(port, get("files.lab", web.port))) == "method"


async def test_random_bytes_do_not_get_through_and_do_not_hang(
    enter: Enter, ask: Ask, lab: Callable[..., None], web: Any
) -> None:
    lab(head_s=2.0, idle_s=2.0)
    gate, port = await enter()
    good, chance = get("files.lab", web.port, "/fine"), random.Random(7)
    pieces = [b"\r\n", b"\n", b"\0", b"Host: other.lab\r\n", b" ", b"\xff", b"HTTP/1.1", b":", b"@other.lab"]

    def mutant() -> bytes:
        data = good
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data) + 1)
            data = (
                data[:at] + chance.choice([*pieces, chance.randbytes(3)]) + data[at + chance.randint(0, 3) :]
            )
        return data + b"\r\n\r\n"

    answers = [await ask(port, mutant()) for _ in range(100)]
    assert all(answer.startswith(b"HTTP/1.1 ") for answer in answers)
    assert sum(bool(denied(answer)) for answer in answers) > 50
    assert (await ask(port, good)).endswith(b"hello")
    for seen in web.seen:
        lines = seen.partition(b"\r\n\r\n")[0].split(b"\r\n")
        assert lines[0].startswith(b"GET /") and lines[0].endswith(b" HTTP/1.1")
        assert lines[1] == b"Host: files.lab:%d" % web.port
        assert not any(line.lower().startswith(b"host:") for line in lines[2:])
    assert DenialReason.PROXY not in gate.reasons


async def test_a_proxy_that_ends_takes_the_network_along_and_says_so(enter: Enter, tmp_path: Path) -> None:
    gate, _ = await enter()
    assert gate._process is not None
    gate._process.kill()
    await until(lambda: DenialReason.PROXY in gate.reasons)
    assert [type(denial) for denial in gate.denials()] == [Denial]
    await gate.close()
    assert list((tmp_path / "doors").iterdir()) == []
