"""Attacks on the node itself: bursts, callers that vanish, clocks, names of others' things, odd requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import struct
from typing import Any

from benchmarks.sandbox_attack_kit import NODE_SANDBOXES, SPEC, Scene, Table, alive, check, typed
from sandbox.client import Fleet, RemoteBox
from sandbox.connection import Connection
from sandbox.errors import LostError, PolicyError, RefusedError, SandboxError
from sandbox.node import SOCKET

TABLE = Table("control plane")


@TABLE.attack("burst of creations", case=44)
async def burst(scene: Scene) -> None:
    """Four times as many creations as fit, at once -> what is taken starts, the rest is refused by kind."""
    calls = [asyncio.create_task(scene.fleet.create(SPEC, wait_s=60)) for _ in range(4 * NODE_SANDBOXES)]
    made = await asyncio.gather(*calls, return_exceptions=True)
    boxes = [box for box in made if isinstance(box, RemoteBox)]
    scene.opened += boxes
    other = {type(failure).__name__ for failure in made if not isinstance(failure, RemoteBox | RefusedError)}
    check(not other, f"creations ended as {other}")
    live = {box.id for box in await scene.fleet.boxes()}
    check(
        {box.id for box in boxes} <= live and len(live) <= NODE_SANDBOXES,
        f"{len(live)} sandboxes, {len(boxes)} made",
    )
    await asyncio.gather(*(alive(box) for box in boxes[:4]))
    await asyncio.gather(*(box.close() for box in boxes))


@TABLE.attack("clock of the host jumps", case=45)
async def clock(scene: Scene) -> None:
    """The node's clock goes an hour ahead, and once more -> leases, deadlines and sandboxes do not care."""
    call = asyncio.create_task(scene.box.exec(["sleep", "1"], timeout_s=30))
    await asyncio.sleep(0.2)
    for _ in range(2):
        os.kill(scene.stage.node.pid, signal.SIGUSR1)
        await asyncio.sleep(0.6)
    check((await call).exit_code == 0, "a command fell to the jump")
    await scene.answers()
    await alive(scene.sibling)


@TABLE.attack("sandboxes of others", case=39)
async def others(scene: Scene) -> None:
    """Another owner names this sandbox in every request, with keys and snapshots.

    -> it does not exist for it.
    """
    async with await Fleet.connect(
        state_dir=scene.stage.folder, owner="thief", backend=scene.stage.tier
    ) as thief:
        taken = RemoteBox(thief._connection, scene.box.id)  # pyright: ignore[reportPrivateUsage]
        works: list[Any] = [
            taken.exec("true"), taken.python("1"), taken.read_file("/tmp/x"), taken.pause(), taken.resume(),
            taken.extend(5), taken.snapshot(), taken.fork(1), taken.start("true"), thief.attach(scene.box.id),
            thief.attach(scene.box.id, replay=True), thief.create(SPEC, snapshot="../../etc/passwd"),
            thief.attach("../journals/" + scene.box.id, replay=True),
            thief.attach("/etc/passwd", replay=True),
            thief.attach("..", replay=True), thief.attach("", replay=True),
        ]  # fmt: skip
        for number, work in enumerate(works):
            error = await typed(work)
            check(isinstance(error, LostError), f"request {number} ended as {error!r}")
        await taken.close()
        check(not await thief.boxes() and not await thief.snapshots(), "it sees what is not its own")
    await scene.answers()


@TABLE.attack("requests out of shape")
async def requests(scene: Scene) -> None:
    """Frames that are none, values of the wrong type, sizes beyond all -> an error each, the node goes on."""
    path = str(scene.stage.folder / SOCKET)
    for data in (
        b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 1 << 31, 0),
        struct.pack("!II", 60000, 0) + b"[" * 60000, struct.pack("!II", 9, 0) + b'{"id": 1}', b"\0" * 4096,
        struct.pack("!II", 20, 1 << 20) + b'{"id":1,"op":"ping"}',
    ):  # fmt: skip
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(data)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 20)
            writer.close()
            await writer.wait_closed()
    connection = await Connection.open(scene.stage.folder / SOCKET)
    try:
        for header in (
            {"op": "run", "box": scene.box.id, "command": {"op": "exec"}}, {"op": "hello"}, {"op": "nothing"},
            {"op": "create", "backend": scene.stage.tier, "spec": {"limits": {"x": 1}}},
            {"op": []}, {"op": None},
            {"op": "run", "box": [], "command": []}, {"op": "attach", "box": {}, "replay": True},
            {"op": "hello", "owner": "x", "backend": scene.stage.tier, "lease_s": float("nan")},
            {"op": "hello", "owner": "x", "backend": scene.stage.tier, "lease_s": float("inf")},
        ):  # fmt: skip
            error = await typed(asyncio.wait_for(connection.request(header), 20))
            check(isinstance(error, SandboxError), f"{header} was answered")
    finally:
        await connection.close()
    await scene.answers()


@TABLE.attack("who may connect")
async def doors(scene: Scene) -> None:
    """Looks at the node's folder and socket -> for its user alone."""
    for path in (scene.stage.folder, scene.stage.folder / SOCKET):
        check(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"{path} is open to others")
    for path in scene.stage.folder.glob("*"):
        if path.name in ("journals", "snapshots"):
            check(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"{path} is open to others")


@TABLE.attack("client killed in the middle", case=5)
async def client_gone(scene: Scene) -> None:
    """A client's connection breaks while its command runs.

    -> the command is killed, the lease decides the rest.
    """
    other = await Fleet.connect(
        state_dir=scene.stage.folder, owner="passer-by", backend=scene.stage.tier, lease_s=0.5
    )
    box = await other.create(SPEC)
    call = asyncio.create_task(typed(box.exec("sleep 4005 & setsid sleep 4005")))
    await asyncio.sleep(0.5)
    await other.close(release=False)
    await call
    deadline = asyncio.get_running_loop().time() + 15
    while await asyncio.to_thread(scene.stage.left_of, [box.id], 0):
        check(asyncio.get_running_loop().time() < deadline, "its sandbox outlives its lease")
        await asyncio.sleep(0.2)


@TABLE.attack("creation cancelled half-way")
async def half_made(scene: Scene) -> None:
    """Cancels creations after 0 to 200 ms -> none is left half made."""
    before = {box.id for box in await scene.fleet.boxes()}
    for wait_s in (0.0, 0.005, 0.02, 0.05, 0.1, 0.2):
        call = asyncio.create_task(scene.fleet.create(SPEC))
        await asyncio.sleep(wait_s)
        call.cancel()
        [made] = await asyncio.gather(call, return_exceptions=True)
        if isinstance(made, RemoteBox):
            scene.opened.append(made)
    deadline = asyncio.get_running_loop().time() + 20
    while True:
        extra = {box.id for box in await scene.fleet.boxes()} - before - {box.id for box in scene.opened}
        load = (await scene.fleet._connection.request({"op": "load"}))[0]  # pyright: ignore[reportPrivateUsage]
        if not extra and not load["starting"]:
            return
        check(asyncio.get_running_loop().time() < deadline, f"left half made: {extra}, {load['starting']}")
        await asyncio.sleep(0.2)


@TABLE.attack("paused sandbox")
async def paused(scene: Scene) -> None:
    """Commands to a sandbox that is paused in the middle of a storm -> refused at once, then it goes on."""
    if not scene.fleet.capabilities.pause:
        check(isinstance(await typed(scene.box.pause()), PolicyError), "it paused without being able to")
        return
    attack = asyncio.create_task(scene.box.exec("b() { b | b & b; }; b", timeout_s=2))
    await asyncio.sleep(0.5)
    await scene.box.pause()
    error = await typed(scene.box.exec("true"))
    check(isinstance(error, RefusedError) and error.reason == "paused", f"it answered {error!r}")
    await scene.box.resume()
    await attack
    await scene.answers()


@TABLE.attack("forks of a full sandbox", needs="disk_snapshot")
async def forks(scene: Scene) -> None:
    """Forks a sandbox whose disk is full and whose processes run wild -> equal copies, or a typed refusal."""
    await scene.box.exec("cat /dev/zero > /workspace/x; yes > /dev/null & yes > /dev/null &")
    made: list[RemoteBox] = []
    error = await typed(_gather(scene.box.fork(2), made))
    scene.opened += made
    check(error is None or isinstance(error, SandboxError), f"it failed otherwise: {error!r}")
    size = (await scene.box.stat("/workspace/x")).size
    for box in made:
        check((await box.stat("/workspace/x")).size == size, "a copy differs")
        check(
            (await box.exec("cat /proc/[0-9]*/comm | grep -c yes")).stdout == b"0\n", "a process came along"
        )
    await scene.answers()


async def _gather(work: Any, into: list[RemoteBox]) -> None:
    into += await work
