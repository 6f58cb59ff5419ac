"""The node agent without HTTP: what it adds to a node that runs as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sandbox.connection import Connection
from sandbox.errors import BackendMissingError, LostError, PolicyError, RefusedError, SandboxError
from sandbox.node import SOCKET
from sandbox.node_server import NodeServer
from sandbox.types import Limits, SandboxSpec

SPEC = asdict(SandboxSpec(limits=Limits(memory_bytes=64 << 20, cpus=0.5)))
CREATE = {"op": "create", "backend": "bubblewrap", "spec": SPEC}


def client(owner: str, lease_s: float = 30.0) -> dict[str, Any]:
    return {"client": {"owner": owner, "lease_s": lease_s}}


async def call(server: NodeServer, header: dict[str, Any], body: bytes = b"") -> dict[str, Any]:
    return (await server.perform(header, body, lambda which, data: None))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


Make = Callable[..., NodeServer]


@pytest.fixture
async def agent(folder: Path) -> AsyncIterator[NodeServer]:
    async with running(NodeServer("n", folder, {"unit": "1"}, starts_per_s=1.0, absent_s=0.5)) as server:
        yield server


@contextlib.asynccontextmanager
async def running(server: NodeServer) -> AsyncIterator[NodeServer]:
    await server.start()
    tending = asyncio.create_task(server.tend())
    try:
        yield server
    finally:
        tending.cancel()
        await server.close()


async def test_ids_name_the_node_and_those_of_another_are_refused(agent: NodeServer) -> None:
    box = (await call(agent, {**CREATE, **client("p:ids")}))["box"]
    assert box.startswith("n.")
    assert (await call(agent, {"op": "boxes", **client("p:ids")}))["boxes"] == [box]
    with pytest.raises(LostError, match="is not of node n"):
        await call(agent, {"op": "pause", "box": "m." + box[2:], **client("p:ids")})
    with pytest.raises(LostError):
        await call(agent, {"op": "close", "box": box.partition(".")[2], **client("p:ids")})
    assert (await call(agent, {"op": "release", "owner": "p:ids"}))["sandboxes"] == 1


async def test_an_absent_owner_loses_its_sandboxes_after_its_lease_and_a_present_one_does_not(
    agent: NodeServer, folder: Path
) -> None:
    for name in ("p:gone", "p:here"):
        await call(agent, {**CREATE, **client(name, lease_s=0.5)})
    control = await Connection.open(folder / SOCKET)
    async with asyncio.timeout(30):
        while "p:gone" in (await control.request({"op": "owners"}))[0]["owners"]:
            await call(agent, {"op": "present", **client("p:here", lease_s=0.5)})
            await asyncio.sleep(0.1)
    assert (await control.request({"op": "owners"}))[0]["owners"]["p:here"]["sandboxes"] == 1
    await control.close()
    await call(agent, {"op": "release", "owner": "p:here"})


async def test_a_heartbeat_counts_who_holds_what_and_whose_requests_are_under_way(agent: NodeServer) -> None:
    await call(agent, {**CREATE, **client("p:load")})
    making = asyncio.create_task(
        call(agent, {**CREATE, **client("p:load"), "flight": {"front": "f", "number": 7}})
    )
    await asyncio.sleep(0)
    while not (load := await call(agent, {"op": "load", "front": "f"}))["flights"] and not making.done():
        pass
    assert load["flights"] == [7]
    assert (await call(agent, {"op": "load", "front": "another"}))["flights"] == []
    await making
    load = await call(agent, {"op": "load", "front": "f"})
    assert (load["name"], load["labels"], load["flights"]) == ("n", {"unit": "1"}, [])
    assert list(load["owners"]["p:load"]) == [2, 128 << 20, 1.0, 128]
    assert list(load["used"]) == [2, 128 << 20, 1.0, 128]
    assert load["backends"]["bubblewrap"]["separate_users"] in (True, False)
    await call(agent, {"op": "release", "owner": "p:load"})


async def test_typed_refusals(folder: Path) -> None:
    async with running(NodeServer("n", folder, {}, starts_per_s=0.001)) as slow:
        with pytest.raises(BackendMissingError, match="no backend 'vm'"):
            await call(slow, {**CREATE, "backend": "vm", **client("p:no")})
        await call(slow, {"op": "drain"})
        with pytest.raises(RefusedError) as drained:
            await call(slow, {**CREATE, **client("p:no")})
        assert drained.value.reason == "draining"
        assert (await call(slow, {"op": "load"}))["draining"]
        assert NodeServer("n", folder, {}).draining, "a restart keeps it"
        await call(slow, {"op": "drain", "on": False})
        box = (await call(slow, {**CREATE, **client("p:no")}))["box"]
        with pytest.raises(RefusedError) as late:
            await call(slow, {"op": "fork", "box": box, "count": 8, **client("p:no")})
        assert late.value.reason == "start_rate"
        await call(slow, {"op": "release", "owner": "p:no"})


async def test_a_node_that_died_is_started_again(agent: NodeServer, folder: Path) -> None:
    about = await call(agent, {**CREATE, **client("p:dead")})
    control = await Connection.open(folder / SOCKET)
    hello = {"op": "hello", "owner": "p:dead", "backend": "bubblewrap", "lease_s": 1.0}
    pid = (await control.request(hello))[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LostError):
        await control.request({"op": "ping"})
    await control.close()
    with pytest.raises(LostError):
        await call(agent, {"op": "run", "box": about["box"], "command": {}, **client("p:dead")})
    again = await call(agent, {"op": "attach", "box": about["box"], "replay": True, **client("p:dead")})
    assert (again["box"], again["generation"]) == (about["box"], 2)
    await call(agent, {"op": "release", "owner": "p:dead"})


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a:b", "a b", "x" * 64])
def test_names_that_would_not_do_in_an_id(name: str, folder: Path) -> None:
    with pytest.raises(PolicyError, match="a node's name"):
        NodeServer(name, folder, {})


async def test_owners_without_end_are_refused(folder: Path) -> None:
    """Each holds a connection: one project cannot use up those of a node."""
    async with running(NodeServer("n", folder, {}, most_owners=3)) as server:
        for number in range(3):
            await call(server, {"op": "boxes", **client(f"greedy:{number}")})
        with pytest.raises(RefusedError, match="owners of project greedy") as refused:
            await call(server, {"op": "boxes", **client("greedy:3")})
        assert refused.value.reason == "busy"
        assert (await call(server, {"op": "boxes", **client("greedy:0")}))["boxes"] == []
        assert (await call(server, {"op": "boxes", **client("modest:0")}))["boxes"] == []


@pytest.mark.parametrize(
    "header",
    [
        {"op": "run", "box": "n.x", "command": "ls"},
        {"op": "run", "box": "n.x", "command": {"op": ["exec"]}},
        {"op": "run", "box": "n.x", "command": {}, "claim": {"unheard": 1}},
        {"op": "extend", "box": "n.x", "ttl_s": "1"},
        {"op": "fork", "box": "n.x", "count": 1e300}, {"op": "create", "backend": "bubblewrap", "spec": []},
        {"op": "create", "backend": ["bubblewrap"], "spec": SPEC}, {"op": "attach", "box": "n.x"},
    ],
)  # fmt: skip
async def test_what_has_a_wrong_shape_is_answered_and_never_waited_for(
    agent: NodeServer, header: dict[str, Any]
) -> None:
    box = (await call(agent, {"op": "boxes", **client("p:shape")}))["boxes"]
    if not box:
        box = [(await call(agent, {**CREATE, **client("p:shape")}))["box"]]
    named = {**header, "box": box[0]} if "box" in header else header
    async with asyncio.timeout(60):
        with pytest.raises((SandboxError, LookupError, TypeError, ValueError)):
            await call(agent, {**named, **client("p:shape")})
