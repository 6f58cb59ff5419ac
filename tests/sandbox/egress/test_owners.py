"""What a sandbox asks of its owner: it reaches its own and no other's, in the phases that allow it."""

from __future__ import annotations

import asyncio
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox import owners
from sandbox.errors import PolicyError
from sandbox.owners import hearing
from sandbox.policy import OWNER_HOST, Network, Rule
from sandbox.remote import RemoteBox

RULE = Rule(OWNER_HOST, methods=("GET", "POST"))
OPEN = Network({"solve": (RULE,), "verify": ()}, "solve")
GET = f"GET http://{OWNER_HOST}/ HTTP/1.1\r\nHost: {OWNER_HOST}\r\n\r\n".encode()
POST = GET.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\nx")


def says(text: bytes, after_s: float = 0.0) -> Callable[..., Any]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if length := re.search(rb"Content-Length: (\d+)", head, re.IGNORECASE):
            await reader.readexactly(int(length[1]))  # closed unread, it would take the answer along
        await asyncio.sleep(after_s)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
        writer.close()

    return answer


async def test_each_sandbox_reaches_its_own_owner_alone(enter: Any, ask: Any, tmp_path: Path):
    (_, first), (_, second), (_, silent) = [await enter(OPEN) for _ in range(3)]
    with hearing(tmp_path, "box0") as one, hearing(tmp_path, "box1") as two:
        async with (
            await asyncio.start_server(says(b"one"), sock=one.sock),
            await asyncio.start_server(says(b"two"), sock=two.sock),
        ):
            answers = [await ask(port, GET) for port in (first, second)]
            nobody = await ask(silent, GET)
            assert (await ask(first, POST)).endswith(b"one")
    assert [answer[-3:] for answer in answers] == [b"one", b"two"]
    assert nobody.startswith(b"HTTP/1.1 502") and b"does not listen" in nobody
    assert one.secret != two.secret
    assert (await ask(first, GET)).startswith(b"HTTP/1.1 502"), "it has left"


async def test_phases_and_methods_hold_for_the_owner_too(enter: Any, ask: Any, reasons: Any, tmp_path: Path):
    gate, port = await enter(Network({"read": (Rule(OWNER_HOST),), "verify": ()}, "read"))
    with hearing(tmp_path, "box0") as ear:
        async with await asyncio.start_server(says(b"x"), sock=ear.sock):
            assert (await ask(port, GET)).endswith(b"x")
            assert (await ask(port, POST)).startswith(b"HTTP/1.1 403")
            assert (await ask(port, GET.replace(b".internal", b".internal:81"))).startswith(b"HTTP/1.1 403")
            gate.switch("verify")
            assert (await ask(port, GET)).startswith(b"HTTP/1.1 403")
    assert reasons(gate) == {"method": 1, "port": 1, "host": 1}


async def test_an_owner_may_think_for_longer_than_others_may_be_silent(
    enter: Any, ask: Any, lab: Any, tmp_path: Path
):
    lab(idle_s=0.2)
    _, port = await enter(OPEN)
    with hearing(tmp_path, "box0") as ear:
        async with await asyncio.start_server(says(b"late", after_s=1.0), sock=ear.sock):
            assert (await ask(port, GET)).endswith(b"late")


def test_a_secret_is_the_sandboxes_own_and_the_same_again(tmp_path: Path):
    with hearing(tmp_path, "box") as before:
        pass
    with hearing(tmp_path, "box") as after, hearing(tmp_path, "box2") as other:
        assert before.secret == after.secret != other.secret
        assert stat.S_IMODE((tmp_path / owners.FOLDER).stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / owners.SECRET).stat().st_mode) == 0o600
    assert not list((tmp_path / owners.FOLDER).iterdir())


def test_who_goes_on_with_a_sandbox_keeps_its_socket_and_leftovers_are_swept(tmp_path: Path):
    with hearing(tmp_path, "box"), hearing(tmp_path, "box") as late:
        late.sock.close()
        (tmp_path / owners.FOLDER / "kept").touch()
        owners.sweep(tmp_path)
        assert not list((tmp_path / owners.FOLDER).iterdir())
    long = tmp_path / ("x" * 120)
    long.mkdir()
    with hearing(long, "box"):
        owners.reach(long, "box-g3").close()


async def test_a_sandbox_behind_a_front_has_no_way_to_its_owner():
    with pytest.raises(PolicyError, match="url local"):
        RemoteBox(object(), "box").hear()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("wrong", [{"port": 443}, {"port": 8080}, {"methods": ("CONNECT",)}])
def test_a_rule_for_the_owner_is_plain_http(wrong: dict[str, Any]):
    with pytest.raises(PolicyError, match="port 80"):
        Rule(OWNER_HOST, **wrong)
