"""The function tier: calls without a past, a millisecond or two each, for judging what a policy wrote.

A sandbox of it is a worker in the namespaces of the light tier that has the next call forked already. Every
call has a process, message and mount namespace, empty folders and a user of its own, and nothing of it is
there when it returns: the kernel takes the namespaces away. Between calls of one sandbox stay its limits and
its loopback, on which nobody listens any more. The agent has the power to make namespaces, but only as root
of a user namespace, whose users are nobody's on the machine.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Set
from pathlib import Path

from sandbox.backends import userns
from sandbox.backends.base import Started, Unprepared, agent_command, refuse_layers
from sandbox.backends.cgroups import Cgroup, controllers, leave, sweep
from sandbox.backends.launch import GATE, Launch
from sandbox.backends.users import USERS
from sandbox.errors import InfrastructureError
from sandbox.toolkit import build
from sandbox.types import Capabilities, Limits, SandboxSpec

_PYTHON = "/usr/bin/python3"
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_AGENT_AT = "/run/tempering"
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_ADMIN")
_COMMAND_UID, _USERS = 128, 1 << 9
"""The user of commands in the namespace of a worker, and how many it has: as many as `USERS` gives."""

_MISSING = {
    "bwrap": "bubblewrap is not installed (as root: apt-get install bubblewrap)",
    _PYTHON: f"there is no {_PYTHON} (as root: apt-get install python3)",
}
_PROBE_S, _PROBED = 20.0, 1 << 30
_ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath)}


class Function(Unprepared):
    """Starts workers with `bwrap` in a user namespace."""

    name = "function"

    def __init__(self, state_dir: Path | None = None) -> None:
        self._state_dir = state_dir
        self._agent: Path | None = None
        self._works = False

    async def missing(self) -> str:
        """Returns what this machine lacks; tries for real, once, as kernels may forbid namespaces."""
        if not self._works:
            if problem := await asyncio.to_thread(_problem):
                return problem
            self._works = True
        return ""

    def capabilities(self) -> Capabilities:
        """Returns what holds here: of calls much, of what stays between calls nothing.

        Every call has a user of its own, but none that could be named (`separate_users`).
        """
        held = controllers()
        return Capabilities(
            images=False,
            memory_limit="memory" in held,
            process_limit="pids" in held,
            cpu_limit="cpu" in held,
            inode_limit=True,
            separate_users=False,
            disk_snapshot=False,
            terminal=False,
            terminal_signals=False,
            stateful=False,
        )

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one worker.

        Raises:
            PolicyError: An image or a layer was asked for.
            InfrastructureError: It could not be started.
        """
        refuse_layers(self.name, spec)
        if self._agent is None:
            assert self._state_dir is not None, "a backend without a state folder only looks around"
            self._agent = await asyncio.to_thread(build, self._state_dir / "toolkit", _PYTHON)
        cgroup, first = Cgroup.create(box_id, spec.limits), USERS.take()
        try:
            launch = Launch.fork([*_worker(spec.limits, self._agent, first)], _ENVIRONMENT, cgroup.enter)
            await launch.entered()
        except BaseException as error:
            await cgroup.remove()
            USERS.give_back(first)
            if isinstance(error, OSError):
                raise InfrastructureError(f"a worker could not be started: {error}") from error
            raise
        channel = await launch.go()
        oom_kills = cgroup.oom_counter()

        async def kill() -> None:
            oom_kills.close()
            launch.kill()
            channel.close()
            await cgroup.remove()
            await launch.wait()
            USERS.give_back(first)

        settle = functools.partial(cgroup.settle, spec.latency)
        return Started(channel, kill, oom_kills, groups=lambda: cgroup.folders, settle=settle)

    async def reap(self, held: Callable[[], Set[str]]) -> list[str]:
        """Workers are what runs in their control groups, of which the node's reaper takes care."""
        return []

    async def reclaim(self, state_dir: Path) -> list[str]:
        """Workers die with their node (`--die-with-parent`); only control groups can be left."""
        return await asyncio.to_thread(sweep)

    def leave(self) -> None:
        """Removes the node's own control group."""
        leave()


def _problem() -> str:
    if os.geteuid() != 0:
        return "it needs root, to give each call a user of its own"
    for program, what in _MISSING.items():
        if shutil.which(program) is None:
            return what
    # What each call does, once: namespaces below that of the user, and their own /proc.
    trial = ("unshare", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "/bin/true")
    try:
        done = subprocess.run(
            [*_namespaces(Path("/usr"), _PROBED), *trial], capture_output=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "the kernel made no namespaces in time"
    if done.returncode == 0:
        return ""
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason"])[-1]
    return f"namespaces cannot be made below those of a user here ({last[:200]})"


def _namespaces(shown: Path, first: int) -> Iterator[str]:
    """Yields a command up to the program that it is to become, in all namespaces, on a read-only system."""
    yield from (_PYTHON, "-I", "-S", userns.__file__, str(first), str(_USERS), str(shown))
    yield from ("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
    yield from ("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv")
    yield from ("--hostname", "sandbox", "--cap-drop", "ALL")
    for capability in _CAPABILITIES:
        yield from ("--cap-add", capability)
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    yield from ("--perms", "0755", "--dir", "/etc")
    for path in _ETC:
        yield from ("--ro-bind-try", path, path)
    yield from ("--proc", "/proc", "--dev", "/dev", "--dir", "/tmp", "--dir", "/workspace")


def _worker(limits: Limits, agent: Path, first: int) -> Iterator[str]:
    yield from _namespaces(agent, first)
    yield from ("--ro-bind", userns.SHOWN, f"{_AGENT_AT}/agent", "--remount-ro", "/")
    yield from ("--block-fd", str(GATE), "--", _PYTHON)
    alone = not {"memory", "pids"} <= controllers()
    yield from agent_command(_AGENT_AT, limits, uid=_COMMAND_UID, alone=alone, fresh=True)
