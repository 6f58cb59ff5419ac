"""How a proxy is started: as a user of its own, in namespaces of its own, with nothing but an interpreter.

It runs for one sandbox and ends with it. One for a whole node would be smaller, but once taken over it would
hold the connections of all sandboxes and could ask in the name of the one that may reach most.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from sandbox.backends.cgroups import Cgroup
from sandbox.egress import filter as calls
from sandbox.egress.operator import Bounds
from sandbox.types import Limits

PROGRAM = Path(__file__).parent / "proxy"
START = "import sys; sys.path.insert(0, '/'); from proxy.main import main; main()"
_USERS = itertools.cycle(range(64000, 65000))
_SYSTEM = ("/lib", "/lib64", "/bin")
_LIMITS = Limits(cpus=0.5, memory_bytes=64 << 20, pids=0)
_NAMESPACES = ("user", "net", "pid", "ipc", "uts")
_Descriptors = list[int]


def lacking() -> str:
    """Returns in one line why no proxy can be confined here; empty when one can, as far as can be told."""
    if shutil.which("bwrap") is None:
        return "its proxy is confined by bubblewrap, which is not installed (apt-get install bubblewrap)"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "its proxy gets a user of its own by setpriv, which is missing (apt-get install util-linux)"
    if not calls.program():
        return "the system calls of this machine's architecture are not known"
    return ""


def limits(bounds: Bounds) -> Limits:
    """Returns what a proxy may use: a thread for each connection."""
    return Limits(_LIMITS.cpus, _LIMITS.memory_bytes, int(bounds.connections) + 16)


async def start(
    cgroup: Cgroup, control: socket.socket, door: socket.socket, bounds: Bounds, program: str = START
) -> asyncio.subprocess.Process:
    """Starts a proxy; what is wrong with its start is on its standard error.

    Args:
        cgroup: Where its memory, processes and cores are counted.
        control: Its end of the connector's socket.
        door: Where it is handed its listener.
        bounds: Its limits of size and time.
        program: What is run in its place, with its arguments: the tests put hostile code there.

    Raises:
        OSError: It could not be started.
    """
    sockets = [control.fileno(), door.fileno()]
    with ExitStack() as opened:
        files: _Descriptors = []
        for path in sorted(PROGRAM.glob("*.py")):
            files.append(opened.enter_context(path.open("rb")).fileno())
        argv = [
            *_user(),
            *_namespaces(files),
            *_interpreter(),
            *("-I", "-S", "-B", "-c", program),
            *map(str, sockets),
            json.dumps(asdict(bounds)),
            calls.program(),
        ]
        try:
            return await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                preexec_fn=cgroup.enter,
                pass_fds=(*sockets, *files),
                env={"PATH": os.environ.get("PATH", os.defpath)},
                cwd="/",
            )
        except subprocess.SubprocessError as error:
            raise OSError("the proxy cannot enter its control groups") from error


def _user() -> Iterator[str]:
    if os.geteuid() == 0:
        user = str(next(_USERS))
        yield from ("setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs")


def _namespaces(files: _Descriptors) -> Iterator[str]:
    yield "bwrap"
    for name in _NAMESPACES:
        yield f"--unshare-{name}"
    yield from ("--unshare-cgroup-try", "--disable-userns", "--uid", "1", "--gid", "1")
    yield from (
        "--die-with-parent",
        "--new-session",
        "--hostname",
        "proxy",
        "--cap-drop",
        "ALL",
        "--clearenv",
    )
    yield from ("--setenv", "MALLOC_ARENA_MAX", "1", "--ro-bind", "/usr", "/usr")
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    if not _system_python():
        yield from ("--ro-bind", sys.base_prefix, sys.base_prefix)
    for path, fd in zip(sorted(PROGRAM.glob("*.py")), files, strict=True):
        yield from ("--ro-bind-data", str(fd), f"/proxy/{path.name}")
    yield from ("--remount-ro", "/", "--chdir", "/", "--")


def _system_python() -> bool:
    return Path("/usr/bin/python3").exists()


def _interpreter() -> Iterator[str]:
    yield "/usr/bin/python3" if _system_python() else os.path.realpath(sys.executable)
