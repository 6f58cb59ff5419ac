"""What is begun and not brought to its end leaves nothing behind: creations, forks, pauses, owners."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sandbox.backends.bubblewrap import Bubblewrap
from sandbox.box import Box
from sandbox.client import Fleet, RemoteBox
from sandbox.errors import InfrastructureError, RefusedError
from sandbox.types import Limits, SandboxSpec

SMALL = SandboxSpec(limits=Limits(memory_bytes=64 << 20))
EXEC = {
    "op": "exec", "argv": ["echo", "on"], "env": {}, "cwd": "/", "timeout_s": 30.0, "limit": 1024,
}  # fmt: skip


async def connect(state_dir: Path) -> Fleet:
    return await Fleet.connect(state_dir=state_dir, owner="me", backend="bubblewrap")


def files(state_dir: Path) -> list[str]:
    folders = [state_dir / "journals", state_dir / "snapshots"]
    return [path.name for folder in folders if folder.exists() for path in folder.iterdir()]


async def until_none(state_dir: Path) -> None:
    for _ in range(300):
        if not files(state_dir):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(files(state_dir))


async def test_a_release_deletes_what_sandboxes_that_are_gone_have_left(tmp_path: Path) -> None:
    async with await connect(tmp_path) as fleet:
        box = await fleet.create(SMALL)
        await box.snapshot()
        psutil.Process(fleet.node_pid).kill()
    async with await connect(tmp_path) as fleet:
        await fleet.create(SMALL)
        assert len(files(tmp_path)) == 4
    assert not files(tmp_path)


@pytest.mark.parametrize("kept", [0, 200])
async def test_a_creation_cut_off_in_its_first_record_is_made_again(kept: int, tmp_path: Path) -> None:
    async with await connect(tmp_path) as fleet:
        box = await fleet.create(SMALL, key="once")
        psutil.Process(fleet.node_pid).kill()
    os.truncate(tmp_path / "journals" / box.id, kept)
    async with await connect(tmp_path) as fleet:
        again = await fleet.create(SMALL, key="once")
        assert again.id != box.id and (await again.exec("true")).exit_code == 0
        assert files(tmp_path) == [again.id]


async def fork_when_calm(box: RemoteBox) -> list[RemoteBox]:
    """Forks once nothing runs in it any more: what was cancelled before may still be ending."""
    while True:
        try:
            return await box.fork(2)
        except RefusedError as error:
            assert error.reason == "busy"
            await asyncio.sleep(0.01)


async def test_cancelled_creations_and_forks_leave_no_file(tmp_path: Path) -> None:
    async with await connect(tmp_path) as fleet:
        box = await fleet.create(SMALL)
        for delay in (0.0, 0.02, 0.1):
            for call in (fleet.create(SMALL), fork_when_calm(box)):
                task = asyncio.ensure_future(call)
                await asyncio.sleep(delay)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    made = await task
                    await asyncio.gather(
                        *(one.close() for one in (made if isinstance(made, list) else [made]))
                    )
        assert await fleet.snapshots() == []
        await box.close()
        await until_none(tmp_path)
        assert await fleet.boxes() == []


async def test_a_creation_cancelled_when_its_answer_is_on_its_way_is_given_back(tmp_path: Path) -> None:
    async with await connect(tmp_path) as fleet, await connect(tmp_path) as other:
        making = asyncio.create_task(fleet.create(SMALL))
        for _ in range(20):
            await asyncio.sleep(0)
        while not files(tmp_path):
            time.sleep(0.01)  # noqa: ASYNC251 (the answer must not be read yet)
        time.sleep(0.3)  # noqa: ASYNC251
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        await until_none(tmp_path)
        assert await other.boxes() == []


async def test_a_sandbox_that_could_not_be_paused_goes_on(tmp_path: Path) -> None:
    async def refuse(stop: bool) -> None:
        raise InfrastructureError("the kernel did not pause")

    backend = Bubblewrap(tmp_path)
    started = replace(await backend.start("box-1", "me", SMALL), pause=refuse)
    box = Box("box-1", "me", SMALL, "bubblewrap", started, backend.capabilities())
    try:
        with pytest.raises(InfrastructureError, match="did not pause"):
            await box.pause()
        assert (await box.run(EXEC, b"")).result.stdout == b"on\n"
    finally:
        await box.close()
        backend.leave()
