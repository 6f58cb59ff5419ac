"""Code that means harm: the sandbox, its siblings and the host go on as before."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from sandbox.client import Fleet, RemoteBox
from sandbox.errors import FileError
from sandbox.types import ExecResult, Limits, SandboxSpec

SYSCALLS = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, number, *args):
    if libc.syscall(number, *args) >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print(name, 'was not refused', ctypes.get_errno())
NEWUSER = 0x10000000
refused('unshare', 272, NEWUSER)
refused('clone', 56, NEWUSER | 17, 0, 0, 0, 0)
refused('mount', 165, b'none', b'/tmp', b'tmpfs', 0, 0)
refused('ptrace', 101, 16, os.getppid(), 0, 0)
refused('keyctl', 250, 0, -3, 0)
refused('bpf', 321, 0, 0, 0)
refused('userfaultfd', 323, 0)
refused('perf_event_open', 298, 0, 0, -1, -1, 0)
refused('io_uring_setup', 425, 1, 0)
refused('mknod', 133, b'/workspace/dev', 0o60666, 0x801)
refused('setuid', 105, 0)
refused('chroot', 161, b'/')
refused('open_by_handle_at', 304, -100, 0, 0)
refused('process_vm_readv', 310, 1, 0, 0, 0, 0, 0)
refused('settimeofday', 164, b'\\0' * 16, 0)
refused('sethostname', 170, b'x', 1)
refused('reboot', 169, 0, 0, 0, 0)
refused('syslog', 103, 3, 0, 0)
refused('setns', 308, 0, 0)
"""


async def healthy(box: RemoteBox) -> None:
    assert (await box.exec(["echo", "fine"], timeout_s=30)).stdout == b"fine\n"
    assert (await box.python("print('fine')", timeout_s=30)).stdout == b"fine\n"


async def script(box: RemoteBox, source: str, timeout_s: float = 20.0) -> ExecResult:
    return await box.exec(["python3", "-c", source], timeout_s=timeout_s)


async def test_fork_bomb_of_the_shell(box: RemoteBox) -> None:
    assert (await box.exec("b() { b | b & b; }; b", timeout_s=1)).exit_code != 0
    await healthy(box)


async def test_fork_bomb_of_python(box: RemoteBox) -> None:
    source = """
import os, signal
for number in range(1, 32):
    if number not in (9, 19, 17): signal.signal(number, signal.SIG_IGN)
while True:
    try:
        os.fork(); os.setsid()
    except OSError: pass
"""
    assert (await box.python(source, timeout_s=1)).timed_out
    await healthy(box)


async def test_a_process_that_ignores_every_signal(box: RemoteBox) -> None:
    start = time.monotonic()
    assert (await box.exec("trap '' TERM INT HUP QUIT; while :; do :; done", timeout_s=0.5)).timed_out
    assert time.monotonic() - start < 10
    await healthy(box)


async def test_a_command_cannot_end_or_stop_what_it_runs_under(box: RemoteBox) -> None:
    for number in ("KILL", "STOP"):
        await box.exec(
            f"kill -{number} -1; for p in /proc/[0-9]*; do kill -{number} ${{p#/proc/}}; done", timeout_s=2
        )
        await box.python(f"import os, signal; os.kill(-1, signal.SIG{number})", timeout_s=2)
    await healthy(box)


async def test_a_thousand_orphans_leave_no_zombie(box: RemoteBox) -> None:
    source = """
import os
for n in range(1000):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
"""
    assert (await script(box, source)).exit_code == 0
    states = await box.exec("sleep 0.2; grep -l '^State:.Z' /proc/[0-9]*/status")
    assert states.stdout == b""


async def test_memory_beyond_the_limit_is_told_apart(box: RemoteBox, fleet: Fleet) -> None:
    assert fleet.capabilities.memory_limit
    result = await script(box, "x = b'x' * (400 << 20)")
    assert (result.exit_code, result.oom) == (137, True)
    result = await box.python("x = b'x' * (400 << 20)")
    assert (result.exit_code, result.oom) == (137, True)
    result = await box.exec(["sh", "-c", "kill -9 $$"])
    assert (result.exit_code, result.oom) == (137, False)
    await healthy(box)


async def test_anonymous_files_count_as_memory(box: RemoteBox) -> None:
    source = "import os\nfd = os.memfd_create('x')\nfor _ in range(1000): os.write(fd, bytes(1 << 20))"
    assert (await script(box, source)).exit_code != 0
    await healthy(box)


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
async def test_filling_a_disk_ends_in_an_error(box: RemoteBox, folder: str) -> None:
    result = await box.exec(f"for i in 1 2 3; do head -c 5000000 /dev/zero > {folder}/$i || exit 9; done")
    assert result.exit_code == 9
    assert b"No space left" in result.stderr or b"File too large" in result.stderr
    await box.exec(f"rm -f {folder}/*")
    await healthy(box)


async def test_filling_a_disk_with_names_ends_in_an_error(box: RemoteBox, fleet: Fleet) -> None:
    if not fleet.capabilities.inode_limit:  # then it counts as memory of the kernel, and the box stays alive
        return
    result = await script(box, "for n in range(3000): open(f'/workspace/{n}', 'w').close()")
    assert b"No space left" in result.stderr
    await healthy(box)


async def test_python_that_leaves_many_files_and_deep_folders(box: RemoteBox) -> None:
    source = "import os\nfor n in range(500): open(f'/workspace/{n}', 'w').close()\n"
    source += "for n in range(300): os.mkdir('d'); os.chdir('d')"
    await box.python(source)
    assert (await box.exec("ls -A /workspace")).stdout == b""


async def test_a_file_of_a_terabyte(box: RemoteBox) -> None:
    await script(box, "import os; os.truncate(os.open('/workspace/x', os.O_CREAT | os.O_RDWR), 1 << 40)")
    with pytest.raises(FileError):
        await box.read_file("/workspace/y")
    await healthy(box)


async def test_open_files_end_in_an_error(box: RemoteBox) -> None:
    result = await script(box, "import os\nfds = [os.open('/dev/null', 0) for _ in range(100000)]")
    assert b"Too many open files" in result.stderr
    await healthy(box)


async def test_no_core_is_written(box: RemoteBox) -> None:
    result = await box.exec("ulimit -c; sh -c 'kill -ABRT $$'; ls -A")
    assert result.stdout == b"0\n"


async def test_output_without_end_is_cut(box: RemoteBox) -> None:
    result = await box.exec("yes & yes >&2", timeout_s=1, output_limit=10_000)
    assert result.timed_out and result.truncated
    assert len(result.stdout) + len(result.stderr) < 21_000
    await healthy(box)


async def test_doors_of_the_kernel_are_shut(box: RemoteBox) -> None:
    result = await script(box, SYSCALLS)
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"", b"")


async def test_a_command_has_no_power(box: RemoteBox) -> None:
    looks = [await box.exec(["cat", "/proc/self/status"])]
    looks.append(await box.python("print(open('/proc/self/status').read())"))
    for look in looks:
        lines = look.stdout.decode().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert int(status["Uid"].split()[0]) >= 60000
        assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize(
    "path",
    [
        "/proc/kcore", "/proc/kmsg", "/proc/kpagecgroup", "/proc/1/mem", "/proc/1/environ", "/sys/firmware/x",
        "/var/run/docker.sock", "/run/containerd/containerd.sock", "/root/.ssh", "/etc/shadow", "/dev/sda",
        "/dev/mem",
    ],
)  # fmt: skip
async def test_nothing_of_the_host_can_be_read(box: RemoteBox, path: str) -> None:
    assert (await box.exec(["head", "-c", "1", path])).exit_code != 0


@pytest.mark.parametrize(
    "path",
    [
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/sys/fs/cgroup/memory/release_agent",
        "/proc/1/oom_adj",
    ],
)
async def test_nothing_of_the_host_can_be_written(box: RemoteBox, path: str) -> None:
    assert (await box.exec(f"echo 1 > {path}")).exit_code != 0


async def test_the_environment_holds_nothing_of_the_host(
    box: RemoteBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {line.split("=")[0] for line in (await box.exec("env")).stdout.decode().split()}
    assert names <= {"PATH", "HOME", "LANG", "PWD", "_", "SHLVL", "OLDPWD"}
    inner = await box.python("import os; print(sorted(os.environ))")
    assert inner.stdout == b"['HOME', 'LANG', 'PATH']\n"


async def test_a_python_call_finds_nothing_of_others_in_its_memory(box: RemoteBox) -> None:
    secret = b"canary-" + b"7c1f"
    other = asyncio.create_task(box.exec("sleep 1.5; cat", stdin=secret * 100))
    await box.exec(["cat"], stdin=secret)
    look = """
import re
word = b'cana' + b'ry-7c' + b'1f'
found = 0
for line in open('/proc/self/maps'):
    low, high, mode = re.match(r'(\\w+)-(\\w+) (\\S+)', line).groups()
    if mode.startswith('rw') and '[v' not in line:
        with open('/proc/self/mem', 'rb') as memory:
            memory.seek(int(low, 16))
            found += memory.read(int(high, 16) - int(low, 16)).count(word)
print(found <= 2)  # the word itself
"""
    result = await box.python(look)
    assert (result.stdout, result.stderr) == (b"True\n", b"")
    assert (await other).stdout == secret * 100


async def test_a_python_call_cannot_touch_another(box: RemoteBox) -> None:
    hold = "import time; open('/tmp/mine', 'w').write('x'); time.sleep(2.5); print(open('/tmp/mine').read())"
    other = asyncio.create_task(box.python(hold))
    attack = """
import os, signal, time
while not os.path.lexists('/tmp/mine'): time.sleep(0.02)
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
move = lambda: os.rename('/tmp/mine', '/tmp/x')
for act in (lambda: open('/tmp/mine').read(), lambda: os.unlink('/tmp/mine'), move):
    try: print('could', act())
    except OSError as error: print(type(error).__name__)
"""
    assert set((await box.python(attack)).stdout.split()) <= {b"PermissionError"}
    assert (await other).stdout == b"x\n"


async def test_no_descriptor_of_the_agent_is_inherited(box: RemoteBox) -> None:
    assert (await box.exec("ls /proc/self/fd | tr '\\n' ' '")).stdout == b"0 1 2 3 "
    assert (
        await box.python("import os; print(os.listdir('/proc/self/fd'))")
    ).stdout == b"['0', '1', '2', '3']\n"


async def test_no_network(box: RemoteBox) -> None:
    source = """
import os, socket
print(sorted(name for _, name in socket.if_nameindex()))
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ('172.17.0.1', 22)), (socket.AF_INET, socket.SOCK_DGRAM,
    ('8.8.8.8', 53)), (socket.AF_INET, socket.SOCK_STREAM, ('169.254.169.254', 80)), (socket.AF_INET6,
    socket.SOCK_STREAM, ('::2', 80)),
):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(2); s.connect(address); print('reached', address)
    except OSError: pass
try: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('raw')
except OSError: pass
print(len([line for line in open('/proc/net/unix') if '@' in line]))
"""
    result = await script(box, source)
    names, sockets = result.stdout.decode().splitlines()
    assert set(eval(names)) <= {
        "lo",
        "tunl0",
        "sit0",
        "ip6tnl0",
        "gre0",
        "gretap0",
        "erspan0",
        "ip_vti0",
        "ip6_vti0",
        "ip6gre0",
    }
    assert sockets == "0"


async def test_siblings_go_on_beside_a_storm(fleet: Fleet, box: RemoteBox) -> None:
    limits = Limits(cpus=0.3, memory_bytes=64 << 20, pids=64)
    storm = await fleet.create(replace(SandboxSpec(), limits=limits))
    bomb = asyncio.create_task(storm.exec("b() { b | b & b; }; b", timeout_s=3))
    for _ in range(10):
        await healthy(box)
    await bomb
    await healthy(storm)
