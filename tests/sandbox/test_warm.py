"""Warm pools: sandboxes that wait, claimed whole or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.client import Fleet
from sandbox.connection import Connection
from sandbox.errors import LostError, PolicyError, RefusedError
from sandbox.node import SOCKET
from sandbox.types import Limits, SandboxSpec
from sandbox.warm_spec import pool_id, read_warm

LIGHT = "bubblewrap"
SPEC = SandboxSpec(limits=Limits(memory_bytes=64 << 20, cpus=0.9))
OTHER = SandboxSpec(limits=Limits(memory_bytes=64 << 20, cpus=0.8))


@pytest.fixture
async def own(backend: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet on a node of its own."""
    async with await Fleet.connect(state_dir=tmp_path, owner="me", backend=backend) as fleet:
        yield fleet


@pytest.fixture
async def light(tmp_path: Path) -> AsyncIterator[Fleet]:
    """The same on the backend that starts fastest."""
    async with await Fleet.connect(state_dir=tmp_path, owner="me", backend=LIGHT) as fleet:
        yield fleet


async def ask(state_dir: Path, **header: Any) -> dict[str, Any]:
    connection = await Connection.open(state_dir / SOCKET)
    try:
        return (await connection.request(header))[0]
    finally:
        await connection.close()


async def until(condition: Callable[[], Awaitable[object]], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def ready(state_dir: Path, spec: SandboxSpec, backend: str) -> int:
    load = await ask(state_dir, op="load")
    return load["warm"].get(pool_id(backend, spec), 0)


async def filled(state_dir: Path, spec: SandboxSpec, backend: str, count: int) -> None:
    async def full() -> bool:
        return await ready(state_dir, spec, backend) == count

    await until(full)


async def test_a_group_is_claimed_whole(own: Fleet, backend: str, tmp_path: Path) -> None:
    await own.warm(SPEC, 2)
    await filled(tmp_path, SPEC, backend, 2)
    rows = (await ask(tmp_path, op="top"))["rows"]
    assert [row["state"] for row in rows] == ["warm"] * 2
    waiting = {row["id"] for row in rows}

    with pytest.raises(RefusedError, match="a group is taken whole") as refused:
        await own.claim(SPEC, 9, fallback="refuse")
    assert refused.value.reason == "pool"
    assert await ready(tmp_path, SPEC, backend) == 2

    boxes = await own.claim(SPEC, 2, fallback="refuse")
    assert {box.id for box in boxes} == waiting
    outputs = await asyncio.gather(*(box.exec("echo $PWD; cat new 2>&1; echo x > new") for box in boxes))
    assert all(
        result.stdout.startswith(b"/workspace\n") and b"No such" in result.stdout for result in outputs
    )
    assert {box.id for box in await own.boxes()} == waiting
    await filled(tmp_path, SPEC, backend, 2)  # filled again, with others
    assert not waiting & {r["id"] for r in (await ask(tmp_path, op="top"))["rows"] if r["state"] == "warm"}
    await boxes[0].close()


async def test_what_the_pool_lacks_is_started(own: Fleet, backend: str, tmp_path: Path) -> None:
    assert len({box.id for box in await own.claim(SPEC, 2)}) == 2  # there is no pool at all
    with pytest.raises(RefusedError) as refused:
        await own.claim(OTHER, 1, fallback="refuse")
    assert refused.value.reason == "pool"
    with pytest.raises(PolicyError, match="create or refuse"):
        await own.claim(SPEC, 1, fallback="maybe")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="1 to 4096"):
        await own.claim(SPEC, 0)


async def test_create_takes_what_equals_its_specification(light: Fleet, tmp_path: Path) -> None:
    await light.warm(SPEC, 1)
    await filled(tmp_path, SPEC, LIGHT, 1)
    (waiting,) = (row["id"] for row in (await ask(tmp_path, op="top"))["rows"])
    assert (await light.create(OTHER)).id != waiting
    box = await light.create(SPEC, key="mine")
    assert box.id == waiting and box.ttl_s == SPEC.ttl_s
    assert (await light.create(SPEC, key="mine")).id == waiting
    assert (await box.exec("true")).exit_code == 0


async def test_a_claim_with_a_key_is_made_once(light: Fleet) -> None:
    first, again = await asyncio.gather(light.claim(SPEC, 2, key="group"), light.claim(SPEC, 2, key="group"))
    assert [box.id for box in first] == [box.id for box in again]
    await first[0].close()
    with pytest.raises(LostError, match="of the 2 sandboxes"):
        await light.claim(SPEC, 2, key="group")


async def test_concurrent_claims_share_nothing(light: Fleet, tmp_path: Path) -> None:
    await light.warm(SPEC, 4)
    await filled(tmp_path, SPEC, LIGHT, 4)
    claims = (light.claim(SPEC, 3, fallback="refuse") for _ in range(3))
    got = await asyncio.gather(*claims, return_exceptions=True)
    assert sorted(isinstance(one, list) for one in got) == [False, False, True]
    assert all(isinstance(one, list | RefusedError) for one in got)


async def test_what_died_in_the_pool_is_not_handed_out(light: Fleet, tmp_path: Path) -> None:
    await light.warm(SPEC, 2)
    await filled(tmp_path, SPEC, LIGHT, 2)
    first, second = (row["id"] for row in (await ask(tmp_path, op="top"))["rows"])
    for process in processes_of(first):
        os.kill(process, signal.SIGKILL)  # a frozen process dies when it is let go on
    (box,) = await light.claim(SPEC, 1, fallback="refuse")
    assert box.id == second and (await box.exec("true")).exit_code == 0
    await filled(tmp_path, SPEC, LIGHT, 2)
    assert first not in {row["id"] for row in (await ask(tmp_path, op="top"))["rows"]}


def processes_of(box_id: str) -> list[int]:
    """The processes in the control groups of a sandbox."""
    root = Path("/sys/fs/cgroup")
    groups = [*root.glob(f"*/tempering/*/{box_id}"), *root.glob(f"tempering/*/{box_id}")]
    return [int(pid) for pid in (groups[0] / "cgroup.procs").read_text().split()]


async def test_a_pool_gives_way_counts_and_ends(light: Fleet, tmp_path: Path) -> None:
    room = (await ask(tmp_path, op="load"))["capacity"][1]
    half = SandboxSpec(limits=Limits(memory_bytes=int(room * 0.6)))
    await light.warm(half, 1)
    await filled(tmp_path, half, LIGHT, 1)
    assert (await ask(tmp_path, op="load"))["used"][0] == 1
    big = await light.create(SandboxSpec(limits=Limits(memory_bytes=int(room * 0.5))))
    load = await ask(tmp_path, op="load")
    assert (load["used"][0], load["pools"][0]["ready"]) == (1, 0)
    assert "gave way" in load["pools"][0]["problem"]
    await big.close()
    await light.warm(half, 0)
    assert (await ask(tmp_path, op="load"))["pools"] == []


async def test_a_hint_ends_with_its_owner(light: Fleet, tmp_path: Path) -> None:
    async with await Fleet.connect(state_dir=tmp_path, owner="brief", backend=LIGHT) as brief:
        await brief.warm(SPEC, 1)
        await light.warm(SPEC, 1)
        assert (await ask(tmp_path, op="load"))["pools"][0]["target"] == 2
        await filled(tmp_path, SPEC, LIGHT, 2)
    assert (await ask(tmp_path, op="load"))["pools"][0]["target"] == 1
    await filled(tmp_path, SPEC, LIGHT, 1)
    await ask(tmp_path, op="hold_back", on=True)
    await filled(tmp_path, SPEC, LIGHT, 0)
    await ask(tmp_path, op="hold_back", on=False)
    await filled(tmp_path, SPEC, LIGHT, 1)


def test_equal_specifications_have_one_pool() -> None:
    whole = SandboxSpec(limits=Limits(cpus=1), ttl_s=60, labels={"a": "1", "b": "2"})
    same = SandboxSpec(limits=Limits(cpus=1.0), ttl_s=60.0, labels={"b": "2", "a": "1"})
    assert whole == same and pool_id("docker", whole) == pool_id("docker", same)
    assert pool_id("docker", whole) != pool_id("bubblewrap", whole)
    assert pool_id("docker", whole) != pool_id("docker", SandboxSpec(limits=Limits(cpus=1), ttl_s=60))


def test_the_file_of_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    path.write_text(json.dumps({"spec": {"limits": {"pids": 32}}, "backend": "docker", "count": 4}))
    warm = read_warm(str(path))
    assert (warm.count, warm.backend, warm.spec) == (4, "docker", SandboxSpec(limits=Limits(pids=32)))
    assert read_warm(f"{path}=9").count == 9
    for text, problem in (
        ({"spec": {"image": "x"}}, "count from 1 to 4096"),
        ({"spec": {"imag": "x"}, "count": 1}, "no 'imag'"),
        ({"spec": {"limits": {"cpu": 1}}, "count": 1}, "no specification"),
        ({"counts": 1}, "has counts"),
        ([1], "JSON object"),
        ({"count": True}, "not True"),
    ):
        path.write_text(json.dumps(text))
        with pytest.raises(PolicyError, match=problem):
            read_warm(str(path))
    with pytest.raises(PolicyError, match="cannot be read"):
        read_warm(str(tmp_path / "none=3"))
