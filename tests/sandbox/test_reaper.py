"""The reaper: what carries a node's marks and is in nobody's hands goes; what is being made stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import psutil
import pytest

from sandbox.backends import cgroups
from sandbox.backends.docker import BOX, STATE_DIR
from sandbox.births import BOOT, NODE, POOL
from sandbox.client import Fleet
from sandbox.connection import Connection
from sandbox.images import ensure_image
from sandbox.node import READY, RECORD, SOCKET
from sandbox.types import Limits, SandboxSpec

SMALL = SandboxSpec(limits=Limits(memory_bytes=64 << 20))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A state folder whose node looks several times a second."""
    words = [
        sys.executable,
        "-m",
        "sandbox.node",
        str(tmp_path),
        "--reap-s",
        "0.3",
        "--idle-s",
        "30",
        "--detach",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    held = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert held.stdout == READY
    yield tmp_path
    node = psutil.Process(json.loads((tmp_path / RECORD).read_text())["pid"])
    node.terminate()
    node.wait(30)


def groups_of(box_id: str) -> list[Path]:
    root = Path("/sys/fs/cgroup")
    return [*root.glob(f"*/tempering/*/{box_id}"), *root.glob(f"tempering/*/{box_id}")]


def sleeper(group: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "600"])
    (group / "cgroup.procs").write_text(str(process.pid))
    return process


async def reaper(state_dir: Path) -> dict[str, Any]:
    connection = await Connection.open(state_dir / SOCKET)
    try:
        return (await connection.request({"op": "load"}))[0]["reaper"]
    finally:
        await connection.close()


async def reaped(state_dir: Path, name: str) -> None:
    async with asyncio.timeout(60):
        while name not in (await reaper(state_dir))["last"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_group_that_nobody_holds_goes(own: Path) -> None:
    async with await Fleet.connect(state_dir=own, owner="me", backend="bubblewrap") as fleet:
        box = await fleet.create(SMALL)
        places = groups_of(box.id)
        if not places:
            assert not cgroups.controllers(), "a sandbox has no groups although there are controllers"
            return
        stray, shared = "0123abcd-0123456789ab", "shared"
        for place in places:
            (place.parent / stray).mkdir()
            (place.parent / shared).mkdir()
        left = sleeper(places[0].parent / stray)
        await reaped(own, stray)
        assert await asyncio.to_thread(left.wait, 60) == -signal.SIGKILL
        assert not any((place.parent / stray).exists() for place in places)
        assert all((place.parent / shared).exists() for place in places)
        assert (await box.exec("echo here")).stdout == b"here\n"
        about = await reaper(own)
        assert (about["period_s"], about["problem"]) == (0.3, "") and about["removed"] >= 1
        for place in places:
            (place.parent / shared).rmdir()


@pytest.mark.docker
async def test_a_container_that_nobody_holds_goes(own: Path) -> None:
    client = docker.from_env()
    stray = "0123abcd-0123456789ab"
    async with await Fleet.connect(state_dir=own, owner="me", backend="docker") as fleet:
        making = [asyncio.create_task(fleet.create(SMALL)) for _ in range(2)]
        image = await asyncio.to_thread(ensure_image, client)

        def leave(box: str, state_dir: str) -> Any:
            labels = {STATE_DIR: state_dir, BOX: box}
            return client.containers.create(image, ["sleep", "600"], labels=labels)

        mine = await asyncio.to_thread(leave, stray, str(own))
        other = await asyncio.to_thread(leave, stray, "/somebody/else")
        try:
            await reaped(own, stray)
            with pytest.raises(docker.errors.NotFound):
                await asyncio.to_thread(client.containers.get, mine.id)
            await asyncio.to_thread(other.reload)  # another node's stays
            for box in await asyncio.gather(*making):  # so does what was being made
                assert (await box.exec("true")).exit_code == 0
                (container,) = client.containers.list(filters={"label": f"{BOX}={box.id}"})
                marks = container.labels
                assert (marks[NODE], marks[POOL]) == (str(own), "")
                assert marks[BOOT] == box.id.partition("-")[0]
        finally:
            await asyncio.to_thread(other.remove, force=True)
            client.close()
