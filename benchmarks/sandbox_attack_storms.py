"""Attacks by processes that come and go without end, while their sandbox is paused, copied and deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.sandbox_attack_kit import Scene, Table, check, typed
from sandbox.client import RemoteBox
from sandbox.errors import InfrastructureError, RefusedError, SandboxError
from sandbox.process import Process

TABLE = Table("storms")

STORM = """
import os, signal, sys
for number in range(5):
    if os.fork() == 0: break
print('here', flush=True)
while True:
    try: os.waitpid(os.posix_spawn('/bin/true', ['/bin/true'], {}), 0)
    except OSError: pass
"""
"""Six processes that start programs by vfork, and nothing else."""

_ORPHANS = """
import os, sys
print('here', flush=True)
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
    except OSError: pass
"""
"""Orphans of orphans, each in a session of its own."""


async def rage(scene: Scene, source: str) -> Process:
    """Starts a storm in the background; returns when it blows."""
    process = await scene.box.start(["/usr/bin/python3", "-c", source])
    log = await process.logs(wait_s=20)
    check(b"here" in log.data, f"the storm did not begin: {log.data[-200:]!r}")
    return process


async def still(box: RemoteBox) -> None:
    """Fails unless a paused sandbox refuses commands as one that is paused."""
    error = await typed(box.exec("true", timeout_s=5))
    check(isinstance(error, RefusedError) and error.reason == "paused", f"a paused sandbox said {error!r}")


@TABLE.attack("spawns without end, paused", needs="pause stateful")
async def paused(scene: Scene) -> None:
    """Starts programs by vfork without end while it is paused and resumed -> each time, in time."""
    process = await rage(scene, STORM)
    for _ in range(2):
        await scene.box.pause()
        await still(scene.box)
        await scene.box.resume()
    check((await scene.box.exec(["echo", "on"], timeout_s=30)).stdout == b"on\n", "it does not go on")
    await typed(process.signal(9))
    await scene.box.halt()
    await scene.answers()


@TABLE.attack("spawns without end, copied and read", needs="stateful disk_snapshot")
async def copied(scene: Scene) -> None:
    """A storm of spawns and orphans while it is forked, snapshot, listed and downloaded.

    -> copies without processes of it, or a typed refusal.
    """
    await scene.box.write_file("/workspace/kept", b"kept")
    await rage(scene, STORM)
    try:
        made = await scene.box.fork(2)
    except (RefusedError, InfrastructureError):
        made = list[RemoteBox]()
    scene.opened += made
    for child in made:
        check(await child.read_file("/workspace/kept") == b"kept", "a copy lacks a file")
        names = await child.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout_s=20)
        check(b"posix_spawn" not in names.stdout, "a copy has a process of its parent")
    with TemporaryDirectory() as folder:
        got = await typed(scene.box.download("/workspace", Path(folder) / "out"))
        check(got is None or isinstance(got, SandboxError), f"a download ended in {got!r}")
    await scene.box.halt()
    await scene.answers()


@TABLE.attack("storms while they are deleted", needs="stateful")
async def deleted(scene: Scene) -> None:
    """Sandboxes full of spawns and orphans are deleted at once -> all of it is gone, soon."""
    boxes = [await scene.fresh() for _ in range(2)]
    for box, source in zip(boxes, (STORM, _ORPHANS), strict=True):
        await box.start(["/usr/bin/python3", "-c", source])
    await asyncio.sleep(0.3)
    await asyncio.wait_for(asyncio.gather(*(box.close() for box in boxes)), 30)
    await scene.answers()


@TABLE.attack("children that are nobody's")
async def nobodys(scene: Scene) -> None:
    """Children given to the parent, ending without a signal, below reapers; a main thread that is gone.

    -> the exit code is the command's own, and all die with it.
    """
    clone = "import ctypes, os, signal, time, threading; libc = ctypes.CDLL(None); signal.signal(10, 1)\n"
    given = clone + (
        "for flags in (0x8000 | 17, 0x8000, 0, 10):\n"
        "    if libc.syscall(56, flags, 0, 0, 0, 0) == 0: time.sleep(0.05); os._exit(0)\n"
        "time.sleep(0.2); os._exit(7)\n"
    )
    code = (await scene.python(given)).exit_code
    check(code in (7, 159), f"it ended with {code}, not 7 or for a forbidden call")
    reaper = clone + (
        "libc.prctl(36, 1, 0, 0, 0)\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0: time.sleep(600)\n"
        "        os._exit(0)\n"
        "time.sleep(600)\n"
    )
    check((await scene.python(reaper, 0.7)).timed_out, "a reaper ended by itself")
    leader = clone + ("threading.Thread(target=time.sleep, args=(600,)).start()\nlibc.syscall(60, 0)\n")
    result = await scene.python(leader, 0.7)
    check(result.timed_out or result.exit_code == 0, f"a thread alone ended as {result}")
    result = await scene.box.exec("ps -e -o args 2>/dev/null || cat /proc/[0-9]*/cmdline", timeout_s=20)
    check(b"time.sleep(600" not in result.stdout, "children outlived their command")
    await scene.answers()


@TABLE.attack("threads and locks")
async def threads(scene: Scene) -> None:
    """Threads until refused, all of them on a few locks with priorities, in many processes.

    -> they die at the deadline.
    """
    source = """
import ctypes, os, threading
libc = ctypes.CDLL(None, use_errno=True)
words = (ctypes.c_int * 64)()
def contend(number):
    while True:
        word, kind = ctypes.byref(words, 4 * (number % 8)), (0, 6, 1, 3, 11)[number % 5]
        libc.syscall(202, word, kind, number % 3, None, None, 0)
for _ in range(3):
    try: os.fork()
    except OSError: pass
number = 0
while number < 400:
    try: threading.Thread(target=contend, args=(number,), daemon=True).start()
    except RuntimeError: break
    number += 1
contend(number)
"""
    result = await scene.python(source, 1.0)
    check(result.exit_code != 0, f"it ended well: {result}")
    await scene.answers()


@TABLE.attack("pauses without end", needs="pause stateful")
async def pauses(scene: Scene) -> None:
    """Twenty pauses beside commands that start, write and end -> each command ends rightly or is refused."""

    async def work(number: int) -> None:
        for turn in range(6):
            try:
                result = await scene.box.exec(f"echo {number}.{turn}; sleep 0.02", timeout_s=30)
            except RefusedError as error:
                check(error.reason == "paused", f"a command was refused as {error.reason}")
                await asyncio.sleep(0.05)
            else:
                check(
                    result.stdout == f"{number}.{turn}\n".encode() and result.exit_code == 0,
                    f"it gave {result}",
                )

    async def hold() -> None:
        for _ in range(20):
            await scene.box.pause()
            await scene.box.resume()

    async with asyncio.TaskGroup() as group:
        for each in (hold(), *(work(number) for number in range(4))):
            group.create_task(each)
    await scene.answers()


@TABLE.attack("no name, byte or process left", needs="stateful inode_limit")
async def nothing_left(scene: Scene) -> None:
    """Takes all names, bytes and processes at once, then asks for everything the sandbox does.

    -> results or typed errors, and all works again when it is halted and emptied.
    """
    source = """
import os
for folder in ('/workspace', '/tmp', '/dev/shm'):
    try:
        os.makedirs(folder + '/full')
        with open(folder + '/full/big', 'wb', 0) as file:
            while True: file.write(bytes(1 << 20))
    except OSError: pass
    try:
        for number in range(100000): os.mknod(folder + f'/full/{number}')
    except OSError: pass
"""
    await scene.python(source, 30)
    sleeper = await scene.box.start("for i in $(seq 200); do sleep 600 & done; wait")
    await asyncio.sleep(0.3)
    box = scene.box
    with TemporaryDirectory() as folder:
        (Path(folder) / "in").write_bytes(bytes(100_000))
        for what in (
            box.write_file("/workspace/new", b"x" * 10000), box.upload(Path(folder) / "in", "/tmp/in"),
            box.list_files("/workspace"), box.stat("/tmp"), box.read_file("/workspace/full/1"),
            box.exec("echo x > /tmp/y", timeout_s=20), box.python("print(1)"),
            box.shell().exec("pwd", timeout_s=20),
            box.download("/dev/shm", Path(folder) / "out"), box.start("sleep 1"),
        ):  # fmt: skip
            await asyncio.wait_for(typed(what), 60)
    await typed(sleeper.signal(9))
    await box.halt()
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        await typed(box.remove(f"{folder}/full"))
    await box.write_file("/workspace/new", b"again")
    await scene.answers()
