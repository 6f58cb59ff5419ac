"""RUN: a command of a build in a sandbox of its own, as root of nothing but the root that is being built."""

from __future__ import annotations

import base64
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from sandbox.backends import bwrap, seccomp
from sandbox.backends.cgroups import Cgroup, leave
from sandbox.errors import LayerError
from sandbox.layers.built_in import Control
from sandbox.layers.inside import inside
from sandbox.types import Limits

LIMITS = Limits(cpus=2.0, memory_bytes=2 << 30, pids=512)
TIMEOUT_S = 1800.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL")
_BECOME = (
    "import os, sys; uid, gid = int(sys.argv[1]), int(sys.argv[2]); os.setgroups([]); "
    "os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid); "
    "os.execvpe(sys.argv[3], sys.argv[3:], os.environ)"
)
_TAIL = 2000
_ROOT = ("", "0", "root")
_MOUNTED = ("proc", "dev", "run", "etc")
_KERNEL = ("sys", "fs", "acpi", "scsi", "driver", "irq", "bus")
_KERNEL_FILES = ("sysrq-trigger", "kcore", "mtrr")
"""What of /proc answers to the number of a user that is root outside too, whatever capabilities it has."""


def run(
    root: Path,
    argv: list[str],
    control: Control,
    *,
    env: Mapping[str, str],
    cwd: str,
    user: str = "",
    network: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Runs a command and returns the end of what it said.

    Args:
        root: Its root, which it may write to.
        argv: The command.
        control: The interpreter that becomes another user first.
        env: Its environment.
        cwd: Its folder.
        user: A name of the root's /etc/passwd, or a number; empty is root.
        network: Whether it has this machine's network; none otherwise.
        timeout_s: When it is ended.

    Raises:
        LayerError: It failed, or took too long; says what it said last.
    """
    for name in _MOUNTED:
        if (root / name).is_symlink():  # it would lead a mount out of the root
            raise LayerError(f"/{name} is a link in the root, where a command has something mounted")
        (root / name).mkdir(exist_ok=True)
    words = _become(root, user, control) + argv
    cgroup = Cgroup.create(f"build-{os.getpid()}-{root.parent.name}", LIMITS)
    with ExitStack() as stack:
        stack.callback(leave)
        stack.callback(cgroup.end)
        output = stack.enter_context(tempfile.TemporaryFile(dir=root.parent))  # its size is limited
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        with os.fdopen(writing, "wb") as file:
            file.write(base64.b64decode(seccomp.program()))
        filters = ["--seccomp", str(reading)] if seccomp.program() else []
        command = [*_namespaces(root, env, cwd, network), *filters, *_control(control, user), "--", *words]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                preexec_fn=cgroup.enter, pass_fds=[reading], timeout=timeout_s, check=False,
            )  # fmt: skip
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = None
        except subprocess.SubprocessError as error:
            raise LayerError(f"{' '.join(argv)[:200]!r} cannot enter its control groups") from error
        output.seek(max(output.seek(0, os.SEEK_END) - _TAIL, 0))
        said = output.read().decode(errors="replace").strip()
    if code != 0:
        how = f"took longer than {timeout_s:.0f} s" if code is None else f"exited with {code}"
        raise LayerError(f"{' '.join(argv)[:200]!r} {how}{': ' + said if said else ''}")
    return said


def _namespaces(root: Path, env: Mapping[str, str], cwd: str, network: bool) -> Iterator[str]:
    yield from ("bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    yield from () if network else ("--unshare-net",)
    yield from (
        "--die-with-parent",
        "--new-session",
        "--hostname",
        "build",
        "--clearenv",
        "--cap-drop",
        "ALL",
    )
    for capability in _CAPABILITIES:
        yield from ("--cap-add", f"CAP_{capability}")
    yield from ("--bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run")
    for name in _KERNEL:
        yield from ("--ro-bind-try", f"/proc/{name}", f"/proc/{name}")
    for name in (name for name in _KERNEL_FILES if os.path.exists(f"/proc/{name}")):
        yield from ("--ro-bind", "/dev/null", f"/proc/{name}")
    if network:
        yield from ("--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf")
    for name, value in {"PATH": PATH, "HOME": "/root", **env}.items():
        yield from ("--setenv", name, value)
    yield from ("--chdir", cwd)


def _control(control: Control, user: str) -> Iterator[str]:
    if user.partition(":")[0] in _ROOT:
        return
    yield from ("--ro-bind", str(control.folder), bwrap.AGENT_AT)
    yield from ("--ro-bind", str(control.library), f"{bwrap.AGENT_AT}/lib/{control.library.name}")


def _become(root: Path, user: str, control: Control) -> list[str]:
    name, _, group = user.partition(":")
    if name in _ROOT:
        return []
    uid = gid = int(name) if name.isdigit() else -1
    passwd = root / inside(root, "/etc/passwd")
    for line in passwd.read_text(errors="replace").splitlines() if passwd.is_file() else ():
        fields = line.split(":")
        if len(fields) > 3 and name in (fields[0], fields[2]):
            uid, gid = int(fields[2]), int(fields[3])
    gid = int(group) if group.isdigit() else gid
    if uid < 0:
        raise LayerError(f"the root has no user {name!r} in /etc/passwd")
    return [*control.command(bwrap.AGENT_AT), "-I", "-S", "-c", _BECOME, str(uid), str(gid)]
