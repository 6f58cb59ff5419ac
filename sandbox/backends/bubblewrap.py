"""The light tier: namespaces by bubblewrap. No network, read-only system, sized tmpfs, no capabilities.

The sandbox shares the host's kernel and its `/usr`, read-only; it starts in milliseconds and needs no daemon.
Run by root, the agent keeps the capabilities to change user and to kill, and commands run as another user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path

from sandbox.backends.base import COMMAND_UID, DOOR, Started, agent_command
from sandbox.backends.cgroups import Cgroup, controllers, leave, sweep
from sandbox.egress import jail
from sandbox.egress.doors import door_of
from sandbox.errors import InfrastructureError, PolicyError
from sandbox.toolkit import AGENT, build
from sandbox.types import Capabilities, Limits, SandboxSpec

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_AGENT_AT = "/run/tempering"
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")


class Bubblewrap:
    """Starts sandboxes with `bwrap`."""

    name = "bubblewrap"

    def __init__(self, state_dir: Path | None = None) -> None:
        self._state_dir = state_dir
        self._agent = AGENT

    async def missing(self) -> str:
        """Returns what this machine lacks; tries a sandbox for real, as kernels may forbid namespaces."""
        if shutil.which("bwrap") is None:
            return "bubblewrap is not installed (apt-get install bubblewrap)"
        probe = await asyncio.create_subprocess_exec(
            *_namespaces(),
            *_system(),
            "--",
            "/bin/true",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, problem = await probe.communicate()
        if probe.returncode == 0:
            return ""
        return f"bwrap cannot make namespaces here: {problem.decode(errors='replace').strip()}"

    def capabilities(self) -> Capabilities:
        """Returns what holds here: limits need control groups, users of their own need root."""
        held = controllers()
        return Capabilities(
            images=False,
            memory_limit="memory" in held,
            process_limit="pids" in held,
            cpu_limit="cpu" in held,
            inode_limit=False,
            separate_users=os.geteuid() == 0,
            pause="freezer" in held,
            network=not jail.lacking(),
        )

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one sandbox.

        Raises:
            PolicyError: An image was asked for.
            InfrastructureError: bwrap could not be started.
        """
        if spec.image:
            raise PolicyError(
                f"the bubblewrap backend has no images (asked for {spec.image!r}); use sandbox.backend=docker"
            )
        if self._agent is AGENT and self._state_dir is not None:
            self._agent = await asyncio.to_thread(build, self._state_dir / "toolkit", _interpreter()[0])
        cgroup = Cgroup.create(box_id, spec.limits, latency=spec.latency)
        try:
            process = await self._spawn(cgroup, spec.limits, self._door(box_id, spec))
        except OSError as error:
            await cgroup.remove()
            raise InfrastructureError(f"bwrap could not be started: {error}") from error
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        oom_kills = cgroup.oom_counter()

        async def kill() -> None:
            oom_kills.close()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            stdin.close()  # bwrap may have been killed before it bound the agent to its life
            await cgroup.remove()
            await process.wait()

        async def pause(stop: bool) -> None:
            await cgroup.freeze(stop)

        return Started(
            stdout, stdin, kill, oom_kills, pause if cgroup.freezes else None, lambda: cgroup.folders
        )

    def _door(self, box_id: str, spec: SandboxSpec) -> Path | None:
        return door_of(self._state_dir, box_id) if spec.network and self._state_dir else None

    async def _spawn(self, cgroup: Cgroup, limits: Limits, door: Path | None) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *cgroup.wrap(_arguments(limits, self._agent, door)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=1 << 22,
        )

    async def reclaim(self, state_dir: Path) -> list[str]:
        """Sandboxes die with their node (`--die-with-parent`); only control groups can be left."""
        return await asyncio.to_thread(sweep)

    async def reap(self, held: Callable[[], Set[str]]) -> list[str]:
        """Sandboxes are what runs in their control groups, of which the node's reaper takes care."""
        return []

    def leave(self) -> None:
        """Removes the node's own control group."""
        leave()


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
    yield from ("--perms", "0755", "--dir", "/etc")  # made in passing it would be closed to commands
    for path in _ETC:
        yield from ("--ro-bind-try", path, path)
    yield from ("--proc", "/proc", "--dev", "/dev")


def _arguments(limits: Limits, agent: Path, door: Path | None) -> Iterator[str]:
    interpreter, extra = _interpreter()
    yield from _namespaces()
    yield from _system()
    yield from extra
    for path in ("/tmp", "/workspace", "/dev/shm"):
        yield from ("--size", str(limits.tmpfs_bytes), "--perms", "1777", "--tmpfs", path)
    if door is not None:
        yield from ("--ro-bind", str(door), DOOR)
    yield from (
        "--ro-bind",
        str(agent),
        f"{_AGENT_AT}/agent",
        "--remount-ro",
        "/",
        "--chdir",
        "/workspace",
        "--",
    )
    root = os.geteuid() == 0
    alone = not {"memory", "pids"} <= controllers()
    yield from (
        interpreter,
        *agent_command(
            _AGENT_AT, limits, uid=COMMAND_UID if root else None, alone=alone, network=door is not None
        ),
    )


def _interpreter() -> tuple[str, tuple[str, ...]]:
    """Returns the interpreter of the sandbox and the mounts it needs: the system's, else our own."""
    if Path("/usr/bin/python3").exists():
        return "/usr/bin/python3", ()
    return os.path.realpath(sys.executable), ("--ro-bind", sys.base_prefix, sys.base_prefix)
