"""The SDK on every backend: streams, sessions, processes, files, trees, pauses, snapshots, forks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.client import Fleet, RemoteBox
from sandbox.errors import (
    CommandTimeoutError,
    DiskFullCommandError,
    DiskFullError,
    ExitError,
    FileError,
    KilledError,
    LostError,
    OutOfMemoryError,
    PolicyError,
    RefusedError,
    UnsafeTreeError,
)
from sandbox.trees import TreeLimits
from sandbox.types import Limits, SandboxSpec

ON_GVISOR = True
SPEC = SandboxSpec(limits=Limits(memory_bytes=128 << 20, tmpfs_bytes=8 << 20, tmpfs_inodes=2000))


async def test_commands_run_as_the_user_asked_for(box: RemoteBox) -> None:
    assert (await box.exec("id -u", user=2345)).stdout == b"2345\n"
    assert int((await box.exec("id -u")).stdout) >= 60000
    await box.exec("echo secret > /tmp/own; chmod 600 /tmp/own", user=2345)
    assert (await box.exec("cat /tmp/own")).exit_code == 1
    result = await box.exec("sleep 4250 & sleep 4250", user=2345, timeout_s=0.3)
    assert result.timed_out
    assert (await box.exec("cat /proc/[0-9]*/cmdline | tr -d '\\0' | grep -c '[s]leep4250'")).stdout == b"0\n"
    for user in (0, 999, 60001, 1 << 40):
        with pytest.raises(PolicyError, match="user"):
            await box.exec("true", user=user)


async def test_output_comes_while_the_command_runs(box: RemoteBox) -> None:
    pieces: list[tuple[bytes, bool]] = []
    async with box.stream("echo one; read x; echo two >&2; sleep 0.3; echo $x", stdin=b"three\n") as stream:
        with pytest.raises(RuntimeError, match="still runs"):
            stream.result  # noqa: B018
        async for piece in stream:
            pieces.append((piece.data, piece.stderr))
    assert (pieces[0], pieces[-1]) == ((b"one\n", False), (b"three\n", False))
    assert (b"two\n", True) in pieces
    result = stream.result
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"one\nthree\n", b"two\n")


async def test_a_stream_is_capped_and_its_result_has_head_and_tail(box: RemoteBox) -> None:
    got = 0
    async with box.stream("echo head; head -c 3000000 /dev/zero; echo tail", output_limit=100_000) as stream:
        async for piece in stream:
            got += len(piece.data)
    assert got == 100_000 and stream.result.truncated
    assert stream.result.stdout.startswith(b"head\n") and stream.result.stdout.endswith(b"tail\n")


async def test_leaving_a_stream_kills_its_command(box: RemoteBox) -> None:
    async with box.stream("echo x; sleep 4251") as stream:
        async for _ in stream:
            break
    look = "cat /proc/[0-9]*/cmdline | tr -d '\\0' | grep -c '[s]leep4251'"
    deadline = time.monotonic() + 60
    while (await box.exec(look)).stdout != b"0\n":
        assert time.monotonic() < deadline


async def test_a_session_keeps_folder_variables_and_functions(box: RemoteBox) -> None:
    shell = box.shell(env={"GIVEN": "1"})
    assert (
        await shell.exec("mkdir -p a/b; cd a/b; X='two words'; export Y=3; f() { echo f$1; }")
    ).exit_code == 0
    assert shell.cwd == "/workspace/a/b" and shell.kept
    result = await shell.exec("pwd; echo \"$X\"; f 7; sh -c 'echo $Y$X$GIVEN'; cat", stdin=b"in")
    assert result.stdout == b"/workspace/a/b\ntwo words\nf7\n31\nin"
    assert (await shell.exec("set -o pipefail; arr=(1 2 3); false | true")).exit_code == 1
    assert (await shell.exec("false | true")).exit_code == 1
    assert (await shell.exec("echo ${arr[1]}; X=changed; exit 9")).exit_code == 9
    assert (await shell.exec("echo $X")).stdout == b"changed\n"
    late = await shell.exec("X=late; cd /; sleep 9", timeout_s=0.3)
    assert late.timed_out and not shell.kept
    assert (await shell.exec("echo $X; pwd")).stdout == b"changed\n/workspace/a/b\n"
    await box.exec("rmdir /workspace/a/b")
    assert b"No such file" in (await shell.exec("true")).stderr


async def test_a_plain_session_keeps_what_is_exported(box: RemoteBox) -> None:
    shell = box.shell(program="sh", cwd="/tmp")
    await shell.exec("export A=1; B=2; cd /")
    assert (await shell.exec("echo $A$B; pwd")).stdout == b"1\n/\n"
    with pytest.raises(PolicyError, match="bash, sh"):
        box.shell(program="fish")


async def test_a_session_with_too_large_a_state_stays_as_it_was(box: RemoteBox) -> None:
    shell = box.shell()
    await shell.exec("A=1")
    for size in (130_000, 400_000):
        assert (
            await shell.exec(f"A=2; BIG=$(head -c {size} /dev/zero | tr '\\0' x); echo ok")
        ).stdout == b"ok\n"
        assert not shell.kept
    assert (await shell.exec("echo $A")).stdout == b"1\n"


async def test_a_background_process(box: RemoteBox) -> None:
    process = await box.start("echo up; read line; echo got $line; read line; echo $line; exit 4")
    assert (await process.logs(wait_s=5)).data == b"up\n"
    await process.write(b"first\n")
    log = await process.logs(3, wait_s=5)
    assert (log.data, log.offset, log.running, log.exit_code) == (b"got first\n", 3, True, None)
    assert (await box.exec("echo meanwhile")).stdout == b"meanwhile\n"
    assert (await process.wait(0.1)).timed_out
    await process.write(b"last", eof=True)
    result = await process.wait(10)
    assert (result.exit_code, result.stdout, result.timed_out) == (4, b"up\ngot first\nlast\n", False)


async def test_a_background_process_hears_signals(box: RemoteBox) -> None:
    loop = "trap 'echo term' TERM; echo up; while :; do sleep 0.05; done"
    process = await box.start(f"exec 2>/dev/null; {loop}")
    await process.logs(wait_s=5)
    await process.signal()
    assert (await process.logs(3, wait_s=5)).data.startswith(b"term\n")
    await process.signal(signal.SIGKILL)
    result = await process.wait(10)
    assert (result.exit_code, result.signal) == (137, signal.SIGKILL)
    await process.signal()
    with pytest.raises(PolicyError, match="no process 9"):
        await type(process)(box, 9).logs()


async def test_the_log_of_a_process_keeps_its_end(box: RemoteBox) -> None:
    process = await box.start("head -c 500000 /dev/zero | tr '\\0' x; echo; echo end", log_limit=1000)
    result = await process.wait(20)
    assert result.truncated and result.stdout.endswith(b"x\nend\n") and len(result.stdout) <= 200_000
    log = await process.logs()
    assert len(log.data) == 1000 and log.end == 500_005
    followed = [
        data async for data in (await box.start("for i in 1 2 3; do echo $i; sleep 0.05; done")).follow()
    ]
    assert b"".join(followed) == b"1\n2\n3\n"


async def test_what_cannot_be_started_says_so(box: RemoteBox) -> None:
    result = await (await box.start(["no-such-program"])).wait()
    assert result.exit_code == 127 and b"No such file" in result.stdout


async def test_processes_are_bounded_and_the_ended_make_room(box: RemoteBox) -> None:
    for _ in range(40):
        await (await box.start(["true"])).wait()
    running = []
    with pytest.raises(RefusedError) as caught:
        for _ in range(40):
            running.append(await box.start(["sleep", "4252"]))
    assert caught.value.reason == "processes" and len(running) == 16
    assert (await box.exec("true")).exit_code == 0


async def test_a_terminal(fleet: Fleet, box: RemoteBox) -> None:
    process = await box.start("test -t 0 && test -t 1 && stty size && tty && cat", terminal=(30, 100))
    text = b""
    while b"/dev/pts/" not in text:
        text = (await process.logs(wait_s=5)).data
    assert text.startswith(b"30 100\r\n")
    await process.write(b"hello\r")
    while text.count(b"hello") < 2:  # the echo, and cat's
        text = (await process.logs(len(text) and 0, wait_s=0.2)).data
    if fleet.capabilities.terminal_signals:
        await process.write(b"\x03")
    else:
        await process.signal(signal.SIGINT)
    assert (await process.wait(10)).signal == signal.SIGINT
    other = await box.start(["sh", "-i"], terminal=(10, 20))
    await other.resize(50, 60)
    await other.write(b"stty size; exit 5\r")
    result = await other.wait(10)
    assert b"50 60" in result.stdout and result.exit_code == 5


async def test_list_stat_and_remove(box: RemoteBox) -> None:
    await box.exec("mkdir -p d/e; echo hi > d/f; ln -s f d/g; mkfifo d/h; touch 'd/i\nj'; chmod 640 d/f")
    found = {info.path.rsplit("/", 1)[1]: info for info in await box.list_files("/workspace/d")}
    assert [(name, info.kind) for name, info in found.items()] == [
        ("e", "dir"), ("f", "file"), ("g", "link"), ("h", "other"), ("i\nj", "file"),
    ]  # fmt: skip
    assert (found["f"].size, found["f"].mode, found["g"].target) == (3, 0o640, "f")
    assert found["f"].uid == int((await box.exec("id -u")).stdout)
    assert await box.stat("/workspace/d/f") == found["f"]
    assert abs(found["f"].mtime / 1e9 - time.time()) < 3600
    with pytest.raises(FileError, match="limit of 2"):
        await box.list_files("/workspace/d", limit=2)
    with pytest.raises(FileError, match="No such file"):
        await box.stat("/none")
    await box.remove("/workspace/d")
    assert await box.list_files() == []
    with pytest.raises(FileError):
        await box.remove("/usr/bin/env")


def make_tree(root: Path) -> None:
    (root / "a/empty").mkdir(parents=True)
    (root / "a/text").write_text("hello")
    (root / "a/run").write_bytes(b"#!/bin/sh\necho ran\n")
    (root / "a/run").chmod(0o4755)
    (root / "large").write_bytes(bytes(range(256)) * 20_000)
    (root / "link").symlink_to("a/text")


async def test_trees_go_in_and_come_out(box: RemoteBox, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    await box.upload(tmp_path / "tree", "/workspace/t")
    look = "cd t; a/run; cat link; stat -c %a a/run; ls -A a; wc -c < large"
    assert (await box.exec(look)).stdout == b"ran\nhello755\nempty\nrun\ntext\n5120000\n"
    await box.download("/workspace/t", tmp_path / "back")
    for path in (tmp_path / "tree").rglob("*"):
        back = tmp_path / "back" / path.relative_to(tmp_path / "tree")
        assert path.is_symlink() == back.is_symlink() and path.is_dir() == back.is_dir()
        if path.is_file():
            assert (
                path.read_bytes() == back.read_bytes() and path.stat().st_mtime_ns == back.stat().st_mtime_ns
            )
    await box.upload(tmp_path / "tree/a/text", "/workspace/one")
    await box.download("/workspace/one", tmp_path / "one")
    assert (tmp_path / "one").read_text() == "hello"
    assert (tmp_path / "back/a/run").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    ("make", "why"),
    [
        ("ln -s /etc/passwd x", "leads out"),
        ("mkdir d; ln -s ../.. d/x", "leads out"),
        ("truncate -s 1T x || dd if=/dev/zero of=x bs=1 seek=7000000 count=1", "bytes"),
        ("seq 300 | while read i; do touch $i; done", "entries"),
    ],
)
async def test_a_download_that_would_do_harm_leaves_nothing(
    box: RemoteBox, tmp_path: Path, make: str, why: str
) -> None:
    await box.exec(make)
    with pytest.raises(FileError, match=why):
        await box.download("/workspace", tmp_path / "x", limits=TreeLimits(5 << 20, 200))
    assert os.listdir(tmp_path) == []
    (tmp_path / "x").touch()
    with pytest.raises(UnsafeTreeError, match="already"):
        await box.download("/workspace", tmp_path / "x")


async def test_an_upload_refuses_what_leads_out(box: RemoteBox, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t/link").symlink_to("/etc")
    with pytest.raises(UnsafeTreeError, match="leads out"):
        await box.upload(tmp_path / "t", "/workspace/t")


async def test_a_full_disk_is_told(box: RemoteBox) -> None:
    result = await box.exec("head -c 20000000 /dev/zero > /workspace/fill || exit 3")
    assert result.disk_full or result.signal  # at the folder's size, or the limit of a file's
    await box.exec("for i in 1 2 3; do head -c 5000000 /dev/zero > /workspace/fill$i; done")
    with pytest.raises(DiskFullError):
        await box.write_file("/workspace/more", bytes(6 << 20))
    with pytest.raises((DiskFullCommandError, KilledError)):
        (await box.exec("head -c 9000000 /dev/zero > /workspace/last")).check()


async def test_results_as_errors(fleet: Fleet, box: RemoteBox) -> None:
    assert (await box.exec("true")).check().exit_code == 0
    for command, kind in (
        ("echo why >&2; exit 3", ExitError),
        ("kill -9 $$", KilledError),
        ("sleep 9", CommandTimeoutError),
    ):
        with pytest.raises(kind) as caught:
            (await box.exec(command, timeout_s=1)).check()
        assert caught.value.result.exit_code in (3, 137, None)
    with pytest.raises(OutOfMemoryError if fleet.capabilities.oom_told else ExitError):
        (await box.python("x = bytearray(1 << 30)\nfor i in range(0, 1 << 30, 4096): x[i] = 1")).check()


async def test_pause_stops_the_clocks(fleet: Fleet, box: RemoteBox) -> None:
    if not fleet.capabilities.pause:
        with pytest.raises(PolicyError, match="pause"):
            await box.pause()
        return
    began = time.monotonic()
    ticks = await box.start("while :; do echo x; sleep 0.02; done")
    running = asyncio.create_task(box.exec("while [ ! -e go ]; do sleep 0.05; done; echo done", timeout_s=4))
    await asyncio.sleep(0.2)
    await box.pause()
    paused = time.monotonic()
    await box.pause()
    with pytest.raises(RefusedError, match="paused") as caught:
        await box.exec("true")
    assert caught.value.reason == "paused"
    await asyncio.sleep(4.5)
    went_on = time.monotonic()
    await box.resume()
    await box.resume()
    await box.write_file("/workspace/go", b"")
    result = await running
    assert (result.exit_code, result.stdout, result.timed_out) == (0, b"done\n", False)
    ticked = (await ticks.logs()).end / 2
    assert ticked <= (paused - began + time.monotonic() - went_on) / 0.02 + 1
    await box.pause()
    async with asyncio.timeout(40):
        await box.close()


async def test_a_snapshot_starts_others(fleet: Fleet, box: RemoteBox) -> None:
    await box.exec("mkdir -p a; echo 1 > a/x; ln -s /usr/bin/env e; echo t > /tmp/y; chmod 700 a")
    name = await box.snapshot()
    await box.exec("echo 2 > a/x")
    other = await fleet.create(SPEC, snapshot=name)
    assert (
        await other.exec("cat a/x /tmp/y; readlink e; stat -c %a a")
    ).stdout == b"1\nt\n/usr/bin/env\n700\n"
    assert await fleet.snapshots() == [name]
    await fleet.forget(name)
    assert await fleet.snapshots() == []
    with pytest.raises(LostError, match=name):
        await fleet.create(SPEC, snapshot=name)


async def test_a_snapshot_of_what_cannot_be_read_is_an_error(fleet: Fleet, box: RemoteBox) -> None:
    await box.exec("mkdir /tmp/closed; touch /tmp/closed/x; chmod 700 /tmp/closed", user=2345)
    with pytest.raises(FileError, match="Permission denied"):
        await box.snapshot()
    assert await fleet.snapshots() == []
    running = asyncio.create_task(box.exec("sleep 0.5"))
    await box.exec("true")
    with pytest.raises(RefusedError, match="run in sandbox"):
        await box.snapshot()
    await running


async def test_forks_share_the_past_and_nothing_else(fleet: Fleet, box: RemoteBox) -> None:
    await box.exec("echo base > x")
    await box.start("sleep 4253")
    children = await box.fork(3)
    assert len({child.id for child in children}) == 3
    await asyncio.gather(*(child.exec(f"echo {n} >> x") for n, child in enumerate(children)))
    await box.exec("echo parent >> x")
    for n, child in enumerate(children):
        assert await child.read_file("/workspace/x") == b"base\n%d\n" % n
        again = await fleet.attach(child.id)
        assert (await again.exec("echo base > x")).exit_code == 0  # from the journal: nothing is written
        assert (await again.start("sleep 4253")).number == 1
        await again.exec(f"echo {n} >> x")
        await again.read_file("/workspace/x")
        assert await again.read_file("/workspace/x") == b"base\n%d\n" % n
        assert (await child.start("true")).number == 2
    assert await box.read_file("/workspace/x") == b"base\nparent\n"
    with pytest.raises(PolicyError, match="count"):
        await box.fork(0)


async def test_extend(fleet: Fleet) -> None:
    box = await fleet.create(replace(SPEC, ttl_s=3))
    await box.extend(60)
    await asyncio.sleep(4.5)
    assert (await box.exec("true")).exit_code == 0
    with pytest.raises(PolicyError, match="ttl_s"):
        await box.extend(0)


async def test_capabilities_are_told(fleet: Fleet, backend: str) -> None:
    told = fleet.capabilities
    assert told.terminal and told.disk_snapshot and not told.memory_snapshot
    assert told.images is (backend == "docker" or (backend == "bubblewrap" and os.geteuid() == 0))
    with pytest.raises(PolicyError, match="cores"):
        await fleet.create(SandboxSpec(limits=Limits(cpus=1e6)))


async def test_commands_that_wait_ahead_may_be_killed(box: RemoteBox) -> None:
    for _ in range(5):
        assert (await box.exec("kill -9 -1; echo spared")).stdout == b"spared\n"  # the caller itself
        assert (await box.exec("echo next")).stdout == b"next\n"


async def test_an_idle_sandbox_lets_go_of_what_waits(box: RemoteBox) -> None:
    await box.exec("true")
    await box.python("pass")
    count, busy = "ls -d /proc/[0-9]* | wc -l", 0
    for _ in range(5):  # what waits is forked once nobody waits for an answer
        busy = max(busy, int((await box.exec(count)).stdout))
        await asyncio.sleep(0.2)
    for seconds in (6, 12, 24):
        await asyncio.sleep(seconds)
        if (idle := int((await box.exec(count)).stdout)) < busy:
            break
    assert idle < busy
    assert (await box.python("print(1)")).stdout == b"1\n"


async def test_a_snapshot_waits_for_nobody_and_others_wait_for_it(box: RemoteBox) -> None:
    await box.exec("head -c 5000000 /dev/urandom > x")
    snapshot = asyncio.create_task(box.snapshot())
    await asyncio.sleep(0)
    results = await asyncio.gather(*(box.exec(f"echo {n}") for n in range(5)))
    assert [int(result.stdout) for result in results] == list(range(5))
    assert await snapshot
