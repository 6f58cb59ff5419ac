"""The versions of the protocol on a node's socket: its clients and itself may be one behind, and no more."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sandbox.channel import encode, read_frame
from sandbox.client import Fleet
from sandbox.connection import Connection
from sandbox.errors import PolicyError
from sandbox.node import SOCKET
from sandbox.types import SandboxSpec
from sandbox.versions import API, reply_for, request_for, served

CAPABILITIES_2 = {
    "images", "memory_limit", "process_limit", "cpu_limit", "inode_limit", "separate_users", "pause",
    "disk_snapshot", "memory_snapshot", "terminal",
}  # fmt: skip
"""Those of which a client of version 2 makes its record; it fails at another."""

GOLDEN = Path(__file__).parents[1] / "data/sandbox_api/version_2.json"


@pytest.fixture
def backend() -> str:
    return "bubblewrap"


async def test_a_client_of_version_2_is_served_by_a_node(fleet: Fleet, state_dir: Path) -> None:
    """The recorded calls of a version 2 client, byte for byte as it sends them on a socket."""
    reader, writer = await asyncio.open_unix_connection(state_dir / SOCKET)
    box = ""
    for number, call in enumerate(json.loads(GOLDEN.read_text()), 1):
        header = {name: value for name, value in call["header"].items() if name != "client"}
        header |= {"id": number, **({"box": box} if "box" in header else {})}
        writer.write(encode(header, call["body"].encode()))
        reply, body = await read_frame(reader)
        assert reply["id"] == number
        assert "error" not in reply, (header, reply)
        assert set(reply.get("capabilities", ())) <= CAPABILITIES_2
        box = reply.get("box", box)
        wanted = {name: value for name, value in call["reply"].items() if header["op"] != "release"}
        assert {name: reply.get(name) for name in wanted} == wanted
        assert body.decode() == call["output"]
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("version", "advice"), [(API + 1, "this server"), (1, "the caller"), ("x", "the caller")]
)
async def test_a_greeting_of_another_version_is_refused(
    fleet: Fleet, state_dir: Path, version: Any, advice: str
) -> None:
    reader, writer = await asyncio.open_unix_connection(state_dir / SOCKET)
    hello = {"op": "hello", "owner": "x", "backend": "auto", "lease_s": 1.0, "version": version, "id": 1}
    writer.write(encode(hello))
    reply, _ = await read_frame(reader)
    assert reply["error"]["type"] == "PolicyError"
    assert f"update {advice}" in reply["error"]["message"]
    writer.close()
    await writer.wait_closed()


async def _converse(path: Path, welcome: dict[str, Any]) -> tuple[asyncio.Server, list[dict[str, Any]]]:
    heard: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in (welcome, {"box": "1"}):
            header, _ = await read_frame(reader)
            heard.append(header)
            writer.write(encode({**reply, "id": header["id"]}))
        writer.close()

    return await asyncio.start_unix_server(answer, path), heard


async def test_a_node_of_version_2_is_spoken_to_in_that(tmp_path: Path) -> None:
    """One that lives on while its clients are updated."""
    server, heard = await _converse(tmp_path / "socket", {"backend": "bubblewrap", "pid": 1})
    connection = await Connection.open(tmp_path / "socket")
    hello = {"op": "hello", "owner": "x", "backend": "auto", "lease_s": 1.0}
    await connection.request(hello)
    create = {"op": "create", "backend": "auto", "spec": asdict(SandboxSpec())}
    with pytest.raises(PolicyError, match="without life_s"):
        await connection.request({**create, "spec": asdict(SandboxSpec(life_s=1.0))})
    assert (await connection.request(create))[0]["box"] == "1"
    assert set(heard[1]["spec"]) == {"image", "limits", "labels", "ttl_s", "journal"}
    assert "disk_bytes" not in heard[1]["spec"]["limits"]
    assert heard[0]["version"] == API
    await connection.close()
    server.close()


async def test_a_node_that_is_newer_is_not_spoken_to(tmp_path: Path) -> None:
    server, _ = await _converse(tmp_path / "socket", {"version": API + 1})
    connection = await Connection.open(tmp_path / "socket")
    with pytest.raises(PolicyError, match=f"version {API}"):
        await connection.request({"op": "hello", "owner": "x", "backend": "auto", "lease_s": 1.0})
    await connection.close()
    server.close()


def test_what_version_2_does_not_have() -> None:
    assert [served(version) for version in (API - 1, str(API))] == [API - 1, API]
    for header in ({"op": "describe"}, {"op": "run", "command": {"op": "processes"}}):
        with pytest.raises(PolicyError, match="update it"):
            request_for(2, header)
        assert request_for(API, header) is header
    limits = {"cpus": 1.0, "disk_bytes": 0}
    create = {"op": "create", "spec": {"limits": limits, "life_s": 0.0, "ttl_s": 5.0}}
    assert request_for(2, create)["spec"] == {"limits": {"cpus": 1.0}, "ttl_s": 5.0}
    limits["disk_bytes"] = 1 << 20
    with pytest.raises(PolicyError, match="without disk_bytes"):
        request_for(2, create)
    hello = {"backend": "docker", "capabilities": {"images": True, "stateful": True}}
    assert reply_for(2, hello)["capabilities"] == {"images": True}
    assert reply_for(API, hello) is hello
    for command in ({"op": "exec", "argv": ["true"]}, {"op": "input", "process": 1, "eof": True}):
        plain = {"op": "run", "command": command}
        assert request_for(2, plain) is plain
