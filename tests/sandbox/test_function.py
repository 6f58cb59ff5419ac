"""Calls without a past: nothing of one is there for the next, whatever it did."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.calls import Call
from sandbox.client import Fleet, RemoteBox
from sandbox.errors import LostError, PolicyError, SandboxError
from sandbox.types import Limits, SandboxSpec

LIMITS = Limits(memory_bytes=96 << 20, tmpfs_bytes=4 << 20, tmpfs_inodes=500, pids=32)


@pytest.fixture
async def fleet(state_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    owner = request.node.name
    async with await Fleet.connect(backend="function", state_dir=state_dir, owner=owner) as fleet:
        yield fleet


@pytest.fixture
async def worker(fleet: Fleet) -> RemoteBox:
    return await fleet.create(SandboxSpec(limits=LIMITS, journal=False))


async def test_a_call_brings_all_it_needs(fleet: Fleet) -> None:
    files = {"data/in.txt": b"47 86", "solve.py": b"#!/usr/bin/python3\nprint('from a file', input())"}
    result = await fleet.call("cat data/in.txt; ./solve.py", files=files, stdin=b"and a line")
    assert (result.exit_code, result.stdout) == (0, b"47 86from a file and a line\n")
    result = await fleet.call(
        source="a, b = map(int, open('data/in.txt').read().split())\nprint(a * b)", files=files
    )
    assert (result.exit_code, result.stdout) == (0, b"4042\n")
    result = await fleet.call(["sh", "-c", "kill -9 $$"])
    assert (result.exit_code, result.signal) == (137, 9)
    for wrong in ({}, {"command": "true", "source": "1"}):
        with pytest.raises(PolicyError, match="either"):
            await fleet.call(**wrong)


async def test_streams_limits_and_what_a_worker_says(worker: RemoteBox) -> None:
    assert (await worker.exec("echo $X; pwd; id -u", env={"X": "y"})).stdout.startswith(b"y\n/workspace\n1")
    result = await worker.exec("echo one; sleep 60", timeout_s=3)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, None, b"one\n")
    result = await worker.python("x = bytearray(400 << 20)")
    assert (result.exit_code, result.oom) == (137, True)
    for _ in range(2):  # a full disk is not full for the next
        result = await worker.exec("head -c 3000000 /dev/zero > a; head -c 3000000 /dev/zero > b")
        assert b"No space left" in result.stderr
    result = await worker.exec("i=0; while echo > $i; do i=$((i+1)); done; ls | wc -l; exit 9")
    assert result.exit_code in (2, 9) and result.disk_full


LEAVE = """
import ctypes, os, subprocess, sys, socket
for folder in ('/tmp', '/workspace', '/dev/shm'):
    os.makedirs(folder + '/a/b'); open(folder + '/.left', 'w').write('secret')
libc = ctypes.CDLL(None, use_errno=True)
assert libc.shmget(4247, 100, 0o1666) >= 0 and libc.semget(4247, 1, 0o1666) >= 0
assert libc.msgget(4247, 0o1666) >= 0
subprocess.Popen(['setsid', 'sh', '-c', 'trap "" TERM HUP; sleep 4247 & sleep 4247'])
quiet = socket.socket(socket.AF_UNIX); quiet.bind(chr(0) + 'left'); quiet.listen()
door = socket.create_server(('127.0.0.1', 4247))
if os.fork() == 0:
    os.setsid(); import time; time.sleep(100)
os.environ['LEFT'] = 'secret'
print('done')
"""
LOOK = """
import ctypes, os, socket
found = [f for p in ('/tmp', '/workspace', '/dev/shm') for f in os.listdir(p)]
libc = ctypes.CDLL(None, use_errno=True)
found += [call(4247, 0o666) for call in (libc.msgget,) if libc.msgget(4247, 0o666) >= 0]
found += ['shm'] if libc.shmget(4247, 100, 0o666) >= 0 else []
found += ['sem'] if libc.semget(4247, 1, 0o666) >= 0 else []
found += [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]
found += [k for k in os.environ if k not in ('PATH', 'HOME', 'LANG')]
for family, where in ((socket.AF_UNIX, chr(0) + 'left'), (socket.AF_INET, ('127.0.0.1', 4247))):
    try:
        socket.socket(family).connect(where); found.append(where)
    except OSError:
        pass
print(found)
"""


@pytest.mark.parametrize("by", ["python", "exec"])
async def test_nothing_of_a_call_is_there_for_the_next(worker: RemoteBox, by: str) -> None:
    run = worker.python if by == "python" else lambda text: worker.exec(["python3", "-c", text])
    for _ in range(3):
        assert (await run(LEAVE)).stdout == b"done\n"
        assert (await run(LOOK)).stdout == b"[]\n"


async def test_what_a_killed_call_started_is_gone_too(worker: RemoteBox) -> None:
    assert (await worker.python(LEAVE + "\nimport time; time.sleep(60)", timeout_s=1)).timed_out
    assert (await worker.python(LOOK)).stdout == b"[]\n"
    task = asyncio.create_task(worker.exec(["python3", "-c", LEAVE + "\nimport time; time.sleep(60)"]))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(30):  # nobody waits for a call that was given up, and calls share the loopback
        while (await worker.python(LOOK)).stdout != b"[]\n":  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_fork_storm_ends_with_its_call(worker: RemoteBox) -> None:
    storm = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert (await worker.python(storm, timeout_s=1)).timed_out
    assert (await worker.python(LOOK)).stdout == b"[]\n"


async def test_a_call_has_no_power_over_worker_or_machine(worker: RemoteBox) -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print([int(libc.unshare(1 << n)) for n in (17, 25, 26, 27, 28, 29, 30)])
print(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))
for act in ('os.kill(1, 9)', "open('/proc/1/mem', 'wb')", "open('/proc/1/environ', 'rb')",
            "open('/proc/sys/kernel/core_pattern', 'w')", "os.listdir('/proc/1/root')", 'os.setuid(0)',
            "open('/workspace/../x', 'w')", "open('/dev/x', 'w')", "os.chmod('/tmp', 0)"):
    try:
        eval(act); print('could', act)
    except OSError:
        pass
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
powers = {int(status[name], 16) for name in ('CapEff', 'CapPrm', 'CapInh', 'CapAmb')}
print(powers, status['NoNewPrivs'].strip())
"""
    expected = b"[-1, -1, -1, -1, -1, -1, -1]\n-1\n{0} 1\n"
    assert (await worker.python(source)).stdout == expected
    assert (await worker.exec(["python3", "-c", source])).stdout == expected


def owners_of(word: str) -> set[int]:
    """Returns the machine's users that have a process with a word in its command line."""
    owners: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                owners.add(folder.stat().st_uid)
    return owners


async def test_users_of_calls_are_nobodys_on_the_machine(worker: RemoteBox) -> None:
    running = asyncio.create_task(worker.exec(["sleep", "4248.25"], timeout_s=30))
    while not (owners := owners_of("4248.25")):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert all(owner > 1 << 20 for owner in owners)


async def test_calls_of_a_worker_take_turns(worker: RemoteBox) -> None:
    count = "import os; print(sum(p.isdigit() for p in os.listdir('/proc')))"
    results = await asyncio.gather(*(worker.python(count) for _ in range(8)))
    assert {result.stdout for result in results} == {b"2\n"}


async def test_what_needs_a_state_is_an_error(fleet: Fleet, worker: RemoteBox, tmp_path: Path) -> None:
    told = fleet.capabilities
    assert not (told.stateful or told.disk_snapshot or told.terminal or told.pause) and told.inode_limit
    asked = [
        worker.write_file("/tmp/x", b""),
        worker.read_file("/tmp/x"),
        worker.list_files(),
        worker.stat("/tmp"),
        worker.remove("/tmp/x"),
        worker.download("/tmp", tmp_path / "x"),
        worker.start("true"),
        worker.shell().exec("true"),
        worker.pause(),
        worker.snapshot(),
        worker.exec("true", user=2000),
        worker.fork(1),
        fleet.create(SandboxSpec(image="x")),
        fleet.create(SandboxSpec(workspace="sha256:0")),
    ]
    for call in asked:
        with pytest.raises(PolicyError):
            await call
    assert (await worker.exec("true")).exit_code == 0
    stateful = await fleet.create(SandboxSpec(backend="bubblewrap"))
    with pytest.raises(PolicyError, match="empty place"):
        await stateful.call(Call("true", files={"x": b""}))


async def test_files_that_do_not_fit_are_the_calls_fault(worker: RemoteBox) -> None:
    result = await worker.call(Call("true", files={"large": bytes(5 << 20)}))
    assert result.exit_code != 0 and b"OSError" in result.stderr
    result = await worker.call(Call("cat /tmp/x ../tmp/y", files={"/tmp/x": b"1", "../tmp/y": b"2"}))
    assert result.stdout == b"12"
    assert (await worker.call(Call("true", files={"/usr/x": b""}))).exit_code != 0


async def test_a_dead_worker_is_replaced(fleet: Fleet) -> None:
    assert (await fleet.call("echo 1")).stdout == b"1\n"
    for box in await fleet.boxes():
        await box.close()
    results = await asyncio.gather(*(fleet.call(f"echo {n}") for n in range(20)), return_exceptions=True)
    told = [result for result in results if isinstance(result, SandboxError)]
    assert all(isinstance(error, LostError) for error in told)
    assert (await fleet.call("echo again")).stdout == b"again\n"


async def test_a_journal_answers_for_calls_too(fleet: Fleet) -> None:
    box = await fleet.create(SandboxSpec(limits=LIMITS))
    drawn = (await box.exec("head -c 9 /dev/urandom | od -An -tx1")).stdout
    again = await fleet.attach(box.id)
    assert (await again.exec("head -c 9 /dev/urandom | od -An -tx1")).stdout == drawn
