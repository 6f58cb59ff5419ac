"""What the workers of `sandbox_soak` do: one kind of life of a sandbox after another, at random."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.sandbox_kills import engine
from sandbox.client import Fleet
from sandbox.connection import Connection
from sandbox.errors import LostError, SandboxError
from sandbox.node import SOCKET
from sandbox.remote import RemoteBox
from sandbox.types import Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory_bytes=64 << 20))
_CGROUPS = Path("/sys/fs/cgroup")
_LEASE_S, _GONE_S = 0.2, 20.0


class Workers:
    """Workers that live on two fleets, and can be made to wait between two sandboxes."""

    def __init__(self, state_dir: Path, light: Fleet, heavy: Fleet | None, width: int):
        self._state_dir, self._light, self._heavy = state_dir, light, heavy
        self._width, self._draw = width, random.Random(0)
        self._go, self._idle = asyncio.Event(), asyncio.Condition()
        self._busy, self._strangers = 0, 0
        self._tasks: list[asyncio.Task[None]] = []
        self.operations, self.cycles, self.problems = 0, Counter[str](), list[str]()
        self._lives: dict[str, Callable[[Fleet], Awaitable[int]]] = {
            "plain": self._plain, "keyed": self._keyed, "fork": self._fork, "snapshot": self._snapshot,
            "pause": self._pause, "timeout": self._timeout, "killed": self._killed,
            "cancelled": self._cancelled, "left": self._left,
        }  # fmt: skip

    async def warm_up(self) -> None:
        """Lives each life once, so that what is made once is made."""
        for fleet in self._fleets():
            for life in self._lives.values():
                self.operations += await life(fleet)

    def start(self) -> None:
        """Starts the workers."""
        self._go.set()
        fleets = self._fleets()
        for number in range(self._width):
            fleet = fleets[-1] if number == 0 else fleets[0]
            self._tasks.append(asyncio.create_task(self._work(fleet)))

    async def stop(self) -> None:
        """Ends them after their sandboxes."""
        async with self.stopped():
            for task in self._tasks:
                task.cancel()
            ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        self.problems += [f"a worker ended: {e!r}" for e in ended if isinstance(e, Exception)]

    @asynccontextmanager
    async def stopped(self) -> AsyncGenerator[None]:
        """Has all workers wait between two sandboxes."""
        self._go.clear()
        async with self._idle:
            await self._idle.wait_for(lambda: self._busy == 0)
        yield
        self._go.set()

    def _fleets(self) -> list[Fleet]:
        return [self._light] if self._heavy is None else [self._light, self._heavy]

    async def _work(self, fleet: Fleet) -> None:
        while True:
            await self._go.wait()
            name = self._draw.choice([*self._lives])
            self._busy += 1
            try:
                self.operations += await self._lives[name](fleet)
                self.cycles[name] += 1
            except (SandboxError, OSError) as error:
                self.problems.append(f"{name}: {type(error).__name__}: {error}")
            finally:
                self._busy -= 1
                async with self._idle:
                    self._idle.notify_all()

    # --- lives; each returns its number of operations

    async def _plain(self, fleet: Fleet) -> int:
        async with await fleet.create(SPEC) as box:
            return 2 + await _use(box)

    async def _keyed(self, fleet: Fleet) -> int:
        self._strangers += 1
        key = f"key-{self._strangers}"
        boxes = await asyncio.gather(*(fleet.create(SPEC, key=key) for _ in range(2)))
        _expect(boxes[0].id == boxes[1].id, "a key made two sandboxes")
        async with boxes[0] as box:
            return 3 + await _use(box)

    async def _fork(self, fleet: Fleet) -> int:
        async with await fleet.create(SPEC) as box:
            done = await _use(box)
            children = await box.fork(2)
            for child in children:
                _expect(await child.read_file("/workspace/data") == _DATA, "a fork has other files")
                await child.close()
            return 3 + done + 2 * len(children)

    async def _snapshot(self, fleet: Fleet) -> int:
        async with await fleet.create(SPEC) as box:
            done = await _use(box)
            name = await box.snapshot()
        async with await fleet.create(SPEC, snapshot=name) as copy:
            _expect(await copy.read_file("/workspace/data") == _DATA, "a snapshot has other files")
        await fleet.forget(name)
        return 7 + done

    async def _pause(self, fleet: Fleet) -> int:
        async with await fleet.create(SPEC) as box:
            if not fleet.capabilities.pause:
                return 2 + await _use(box)
            await box.start("sleep 600")
            await box.pause()
            await box.resume()
            return 5 + await _use(box)

    async def _timeout(self, fleet: Fleet) -> int:
        async with await fleet.create(SPEC) as box:
            result = await box.exec("setsid sleep 600 & sleep 600", timeout_s=0.2)
            _expect(result.timed_out, "a command did not run into its limit")
            return 3 + await _use(box)

    async def _killed(self, fleet: Fleet) -> int:
        box = await fleet.create(SPEC)
        done = await _use(box)
        if await self._kill(fleet, box):
            try:
                while True:
                    await box.exec("sleep 600")
            except LostError:
                pass
        await box.close()
        return 3 + done

    async def _kill(self, fleet: Fleet, box: RemoteBox) -> bool:
        """Kills all that runs in a sandbox; returns whether that can be done here."""
        if fleet is self._heavy:
            await asyncio.to_thread(_kill_container, box.id)
            return True
        return await asyncio.to_thread(_kill_groups, box.id)

    async def _cancelled(self, fleet: Fleet) -> int:
        async with await fleet.create(SPEC) as box:
            calls = [box.exec("sleep 600 & sleep 600"), box.exec("sleep 600"), fleet.create(SPEC)]
            running: list[asyncio.Task[Any]] = [asyncio.create_task(call) for call in calls]
            await box.exec("true")
            for task in running:
                task.cancel()
            for made in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(made, RemoteBox):
                    await made.close()
            return 6 + await _use(box)

    async def _left(self, fleet: Fleet) -> int:
        """Goes away without a word; its owner comes back when the lease has ended, and deletes journals."""
        self._strangers += 1
        owner = f"stranger-{self._strangers}"
        there = {"state_dir": self._state_dir, "owner": owner, "backend": fleet.backend}
        gone = await Fleet.connect(**there, lease_s=_LEASE_S)
        try:
            running = asyncio.create_task((await gone.create(SPEC)).exec("sleep 600"))
            await asyncio.sleep(0.05)
        finally:
            await gone.close(release=False)
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(_GONE_S):
            while await _there(self._state_dir, owner):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.1)
        async with await Fleet.connect(**there) as back:
            _expect(not await back.boxes(), "a sandbox has outlived its lease")
        return 7


async def _there(state_dir: Path, owner: str) -> bool:
    """Whether a node knows an owner."""
    connection = await Connection.open(state_dir / SOCKET)
    try:
        return owner in (await connection.request({"op": "owners"}))[0]["owners"]
    finally:
        await connection.close()


def _kill_groups(box_id: str) -> bool:
    groups = [*_CGROUPS.glob(f"tempering/*/{box_id}"), *_CGROUPS.glob(f"pids/tempering/*/{box_id}")]
    for group in groups:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # one takes others along
                os.kill(int(pid), signal.SIGKILL)
    return bool(groups)


def _kill_container(box_id: str) -> None:
    client = engine()
    for container in client.api.containers(filters={"label": f"tempering.sandbox={box_id}"}):
        client.api.kill(container["Id"])
    client.close()


_DATA = b"data" * 1000


async def _use(box: RemoteBox) -> int:
    await box.write_file("/workspace/data", _DATA)
    result = await box.exec("wc -c < data; echo x >> log")
    _expect(result.stdout.split() == [b"4000"], "a command saw another file")
    await box.python("print(6 * 7)")
    _expect(await box.read_file("/workspace/log") == b"x\n", "a file is not what was written")
    return 4


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise SandboxError(problem)
