"""What every backend does alike."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox.client import Fleet, RemoteBox
from sandbox.errors import FileError, LostError, PolicyError
from sandbox.types import SandboxSpec

ON_GVISOR = True


async def running(box: RemoteBox, word: str) -> bool:
    """Looks whether a process of the sandbox has `word` in its command line."""
    look = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '{word[0]}[{word[1]}]{word[2:]}'"
    return (await box.exec(look)).stdout.strip() != b"0"


async def test_argv_with_streams_and_exit_code(box: RemoteBox) -> None:
    result = await box.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert not (result.truncated or result.timed_out or result.oom)


async def test_shell_line_takes_stdin_env_and_folder(box: RemoteBox) -> None:
    result = await box.exec("pwd; echo $X; cat", stdin=b"in", env={"X": "y z"}, cwd="/tmp")
    assert (result.exit_code, result.stdout) == (0, b"/tmp\ny z\nin")


async def test_a_signal_gives_128_plus_its_number(box: RemoteBox) -> None:
    assert (await box.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137


@pytest.mark.parametrize(
    ("argv", "cwd"), [(["no-such-program"], "/workspace"), (["true"], "/no/such/folder")]
)
async def test_what_cannot_be_run_says_so(box: RemoteBox, argv: list[str], cwd: str) -> None:
    result = await box.exec(argv, cwd=cwd)
    assert result.exit_code == 127
    assert b"No such file or directory" in result.stderr


async def test_python(box: RemoteBox) -> None:
    result = await box.python("import sys; print(47 * 86, sys.stdin.read())", stdin=b"ok")
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"4042 ok\n", b"")


@pytest.mark.parametrize(
    ("source", "code", "error"),
    [
        ("1 / 0", 1, b"ZeroDivisionError: division by zero"),
        ("print(", 1, b"SyntaxError"),
        ("exit(7)", 7, b""),
        ("raise SystemExit('no')", 1, b"no\n"),
        ("import os; os._exit(5)", 5, b""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, b""),
        ("def f(): f()\nf()", 1, b"RecursionError"),
        ("raise KeyboardInterrupt", 1, b"KeyboardInterrupt"),
    ],
)
async def test_python_that_fails(box: RemoteBox, source: str, code: int, error: bytes) -> None:
    result = await box.python(source)
    assert result.exit_code == code
    assert error in result.stderr


async def test_python_waits_for_its_threads(box: RemoteBox) -> None:
    source = (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()"
    )
    assert (await box.python(source)).stdout == b"late\n"


async def test_python_leaves_no_variable_file_or_process(box: RemoteBox) -> None:
    leave = """
import builtins, os, subprocess, sys
builtins.left = sys.left = 1
for folder in ('/tmp', '/workspace', '/dev/shm'):
    os.makedirs(folder + '/a/b/c')
    open(folder + '/a/b/c/file', 'w').write('x')
    open(folder + '/.hidden', 'w').write('x')
    os.chmod(folder + '/a/b', 0)
subprocess.Popen(['sh', '-c', 'sleep 4241 & exit'], start_new_session=True).wait()
print('done')
"""
    assert (await box.python(leave)).stdout == b"done\n"
    look = "import builtins, os, sys; print(hasattr(builtins, 'left'), hasattr(sys, 'left'), "
    look += "os.listdir('/tmp') + os.listdir('/workspace') + os.listdir('/dev/shm'))"
    assert (await box.python(look)).stdout == b"False False []\n"
    assert not await running(box, "sleep 4241")


async def test_timeout_keeps_output_and_has_no_exit_code(box: RemoteBox) -> None:
    start = time.monotonic()
    result = await box.exec("echo first; sleep 100", timeout_s=1.0)
    assert result.timed_out and result.exit_code is None
    assert result.stdout == b"first\n"
    assert time.monotonic() - start < 10


async def test_timeout_ends_the_whole_tree(box: RemoteBox) -> None:
    """A shell, a child that ignores signals, and a daemon that has forked twice into a session of its own."""
    tree = "trap '' TERM INT HUP; (setsid sh -c 'sleep 4242 & sleep 4242' &) ; sleep 4242"
    result = await box.exec(tree, timeout_s=0.5)
    assert result.timed_out
    assert not await running(box, "sleep 4242")


async def test_python_timeout_ends_the_whole_tree(box: RemoteBox) -> None:
    source = "import subprocess\nsubprocess.run(['sh', '-c', 'setsid sleep 4243 & sleep 4243'])"
    assert (await box.python(source, timeout_s=0.5)).timed_out
    assert not await running(box, "sleep 4243")


async def test_returns_when_the_main_process_ends_though_a_child_holds_its_output(box: RemoteBox) -> None:
    start = time.monotonic()
    result = await box.exec("echo here; sleep 4244 & exit 5")
    assert (result.exit_code, result.stdout) == (5, b"here\n")
    assert time.monotonic() - start < 5
    assert await running(box, "sleep 4244")


async def test_a_cancelled_caller_kills_its_command(box: RemoteBox) -> None:
    task = asyncio.create_task(box.exec("setsid sleep 4245 & sleep 4245"))
    while not await running(box, "sleep 4245"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadline = time.monotonic() + 5
    while await running(box, "sleep 4245"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_commands_that_are_cancelled_take_nothing_of_others_along(box: RemoteBox) -> None:
    for number in range(3):
        await box.write_file("/workspace/kept", b"data")
        calls = ["sleep 600 & sleep 600", "sleep 600"]
        cancelled = [asyncio.create_task(box.exec(call)) for call in calls]
        others = [asyncio.create_task(box.exec(f"sleep 0.2; exit {n}")) for n in range(40)]
        await box.exec("true")
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        assert [(await other).exit_code for other in others] == [*range(40)], f"round {number}"
        assert (await box.exec(["cat", "/workspace/kept"])).stdout == b"data", f"round {number}"


async def test_output_is_cut_in_the_middle(box: RemoteBox) -> None:
    result = await box.exec("echo head; head -c 20000000 /dev/zero; echo tail", output_limit=1000)
    assert result.exit_code == 0 and result.truncated
    assert result.stdout.startswith(b"head\n") and result.stdout.endswith(b"tail\n")
    assert len(result.stdout) < 1100 and b"bytes dropped" in result.stdout


@pytest.mark.slow
async def test_a_gigabyte_of_output(box: RemoteBox) -> None:
    result = await box.exec("head -c 1000000000 /dev/zero", timeout_s=120)
    assert result.exit_code == 0 and result.truncated
    assert len(result.stdout) < (1 << 20) + 128


async def test_output_of_a_quarter_of_the_memory(box: RemoteBox) -> None:
    result = await box.exec("head -c 300000000 /dev/zero; echo tail", output_limit=32 << 20, timeout_s=60)
    assert (result.exit_code, result.truncated) == (0, True)
    assert (32 << 20) <= len(result.stdout) < (32 << 20) + 128
    assert result.stdout.endswith(b"tail\n")


async def test_input_that_nobody_reads(box: RemoteBox) -> None:
    assert (await box.exec(["true"], stdin=bytes(5 << 20))).exit_code == 0


async def test_large_input_and_output(box: RemoteBox) -> None:
    data = bytes(range(256)) * 8000
    assert (await box.exec(["cat"], stdin=data, output_limit=8 << 20)).stdout == data


async def test_many_commands_at_once(box: RemoteBox) -> None:
    calls = [box.python(f"print({n})") for n in range(30)] + [box.exec(["echo", str(n)]) for n in range(30)]
    results = await asyncio.gather(*calls)
    assert [int(result.stdout) for result in results] == 2 * list(range(30))


async def test_files(box: RemoteBox) -> None:
    data = bytes(range(256)) * 1000
    await box.write_file("/workspace/a/b/c.bin", data, mode=0o700)
    assert await box.read_file("/workspace/a/b/c.bin") == data
    assert (await box.exec("find /workspace/a/b/c.bin -printf %m")).stdout == b"700"
    await box.write_file("/workspace/a/b/c.bin", b"")
    assert await box.read_file("/workspace/a/b/c.bin") == b""
    assert (await box.exec("echo more >> /workspace/a/b/c.bin; cat /workspace/a/b/c.bin")).stdout == b"more\n"


@pytest.mark.parametrize(
    ("make", "path", "why"),
    [
        ("true", "/workspace/none", "No such file"),
        ("true", "/workspace", "not a regular file"),
        ("mkfifo /workspace/fifo", "/workspace/fifo", "not a regular file"),
        ("head -c 1001 /dev/zero > /workspace/large", "/workspace/large", "limit of 1000"),
        ("true", "/dev/zero", "not a regular file"),
    ],
)
async def test_files_that_cannot_be_read(box: RemoteBox, make: str, path: str, why: str) -> None:
    await box.exec(make)
    with pytest.raises(FileError, match=why):
        await box.read_file(path, limit=1000)


async def test_the_environment_of_the_first_process_tells_nothing(box: RemoteBox) -> None:
    try:
        assert await box.read_file("/proc/1/environ") in (b"", b"PATH=/usr/bin:/bin\0HOME=/\0")
    except FileError as error:
        assert "Permission denied" in str(error)


async def test_a_file_of_exactly_the_limit(box: RemoteBox) -> None:
    await box.write_file("/workspace/x", bytes(1000))
    assert len(await box.read_file("/workspace/x", limit=1000)) == 1000


@pytest.mark.parametrize(
    "path", ["/usr/bin/x", "/run/tempering/agent/agent.py", "/bin/sh", "/etc/passwd", "/x"]
)
async def test_the_system_cannot_be_written(box: RemoteBox, path: str) -> None:
    with pytest.raises(FileError):
        await box.write_file(path, b"x")
    assert (await box.exec(["true"])).exit_code == 0


async def test_files_go_through_no_link_at_the_end(box: RemoteBox) -> None:
    await box.exec("ln -s /workspace/target /workspace/link")
    with pytest.raises(FileError):
        await box.write_file("/workspace/link", b"x")


async def test_sandboxes_share_nothing(fleet: Fleet, box: RemoteBox) -> None:
    other = await fleet.create(SandboxSpec())
    await box.write_file("/workspace/secret", b"x")
    await box.exec("sleep 4246 &")
    assert (await other.exec("find /workspace /tmp /dev/shm -mindepth 1")).stdout == b""
    assert not await running(other, "sleep 4246")


async def test_a_closed_sandbox_is_lost(fleet: Fleet) -> None:
    async with await fleet.create() as box:
        pass
    with pytest.raises(LostError, match=box.id):
        await box.exec(["true"])
    await box.close()


async def test_what_makes_no_sense_is_refused(box: RemoteBox) -> None:
    with pytest.raises(PolicyError, match="output_limit"):
        await box.exec("true", output_limit=1 << 40)
    with pytest.raises(PolicyError, match="timeout_s"):
        await box.exec("true", timeout_s=0)
    with pytest.raises(PolicyError, match="word"):
        await box.exec([])


async def test_pool_spreads_calls_and_replaces_the_dead(fleet: Fleet) -> None:
    pool = await fleet.pool(SandboxSpec(), 2)

    async def call(n: int) -> int:
        async with pool.borrow() as box:
            return int((await box.python(f"print({n})")).stdout)

    assert await asyncio.gather(*(call(n) for n in range(64))) == list(range(64))
    async with pool.borrow() as box:
        dead = box
    await dead.close()
    lost = 0
    for n in range(6):
        try:
            assert await call(n) == n
        except LostError:
            lost += 1
    assert lost == 1 and pool.replaced == 1


async def test_the_system_serves_commands_as_it_serves_others(box: RemoteBox) -> None:
    assert (await box.exec("test -r /etc/ld.so.cache && ls /etc")).exit_code == 0


@pytest.mark.parametrize("count", [0, -1, 1 << 40, 1.5, True, "2"])
async def test_a_fork_of_no_number_is_refused(fleet: Fleet, box: RemoteBox, count: object) -> None:
    with pytest.raises(PolicyError, match="a fork makes 1 to 256"):
        await fleet._connection.request({"op": "fork", "box": box.id, "count": count})
