"""The light tier: namespaces by bubblewrap. No network, read-only system, sized tmpfs, no capabilities.

The sandbox shares the host's kernel and its `/usr`, read-only; it starts in milliseconds and needs no daemon.
Run by root, the agent keeps the capabilities to change user and to kill, and commands run as another user.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from sandbox.backends.base import AGENT, COMMAND_UID, Started
from sandbox.backends.cgroups import Cgroup, sweep
from sandbox.errors import InfrastructureError
from sandbox.types import Limits, SandboxSpec

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")


class Bubblewrap:
    """Starts sandboxes with `bwrap`."""

    name = "bubblewrap"

    async def missing(self) -> str:
        """Returns what this machine lacks; tries a sandbox for real, as kernels may forbid namespaces."""
        if shutil.which("bwrap") is None:
            return "bubblewrap is not installed (apt-get install bubblewrap)"
        probe = await asyncio.create_subprocess_exec(
            *_namespaces(), *_system(), "--", "/bin/true",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, problem = await probe.communicate()
        return (
            "" if probe.returncode == 0 else f"bwrap cannot make namespaces here: {problem.decode().strip()}"
        )

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one sandbox.

        Raises:
            InfrastructureError: An image was asked for, or bwrap could not be started.
        """
        if spec.image:
            raise InfrastructureError(
                f"the bubblewrap backend has no images (asked for {spec.image!r}); use sandbox.backend=docker"
            )
        cgroup = Cgroup.create(box_id, spec.limits)
        process = await asyncio.create_subprocess_exec(
            *cgroup.wrap(_arguments(spec.limits)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=1 << 22,
        )
        assert process.stdin is not None and process.stdout is not None

        async def kill() -> None:
            if process.returncode is None:
                process.kill()
            await process.wait()
            cgroup.remove()

        async def oom_kills() -> int:
            return cgroup.oom_kills()

        return Started(process.stdout, process.stdin, kill, oom_kills)

    async def reclaim(self, keep: frozenset[str]) -> list[str]:
        """Sandboxes die with their node (`--die-with-parent`); only empty control groups can be left."""
        sweep()
        return []


def _namespaces() -> Iterator[str]:
    yield from (
        "bwrap",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    )
    yield from ("--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv")
    if os.geteuid() != 0:
        yield from ("--unshare-user", "--uid", str(COMMAND_UID), "--gid", str(COMMAND_UID))
    yield from ("--cap-drop", "ALL")
    if os.geteuid() == 0:
        for capability in _CAPABILITIES:
            yield from ("--cap-add", capability)


def _system() -> Iterator[str]:
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in _ETC:
        yield from ("--ro-bind-try", path, path)
    yield from ("--proc", "/proc", "--dev", "/dev")


def _arguments(limits: Limits) -> Iterator[str]:
    interpreter, extra = _interpreter()
    yield from _namespaces()
    yield from _system()
    yield from extra
    for path in ("/tmp", "/work", "/dev/shm"):
        yield from ("--size", str(limits.tmpfs_bytes), "--perms", "1777", "--tmpfs", path)
    yield from ("--ro-bind", str(AGENT), "/run/tempering/agent.py", "--remount-ro", "/", "--chdir", "/work")
    yield from ("--", interpreter, "-I", "-S", "/run/tempering/agent.py", str(COMMAND_UID))


def _interpreter() -> tuple[str, tuple[str, ...]]:
    """Returns the interpreter of the sandbox and the mounts it needs: the system's, else our own."""
    if Path("/usr/bin/python3").exists():
        return "/usr/bin/python3", ()
    return os.path.realpath(sys.executable), ("--ro-bind", sys.base_prefix, sys.base_prefix)
