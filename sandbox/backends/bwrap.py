"""The command lines of bubblewrap: namespaces, what of the machine or of layers is the root, the agent."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sandbox.backends.base import COMMAND_UID, agent_command
from sandbox.backends.cgroups import controllers
from sandbox.layers.built_in import Control
from sandbox.types import Limits

AGENT_AT = "/run/tempering"
"""Where a sandbox has the agent, and in a composed root its interpreter."""

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")


def namespaces() -> Iterator[str]:
    """Yields the program and what it keeps from the machine."""
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


def system() -> Iterator[str]:
    """Yields the machine's own system as a root, read-only."""
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    yield from ("--perms", "0755", "--dir", "/etc")  # made in passing it would be closed to commands
    for path in _ETC:
        yield from ("--ro-bind-try", path, path)
    yield from ("--proc", "/proc", "--dev", "/dev")


def plain(limits: Limits, agent: Path, places: Path | None) -> Iterator[str]:
    """Yields the command of a sandbox whose root is the machine's own system.

    Args:
        limits: Of the sandbox.
        agent: The folder of the agent.
        places: Where its writable folders are mounted already; None to have bubblewrap make them.
    """
    program, extra = interpreter()
    yield from namespaces()
    yield from system()
    yield from extra
    for path in ("/tmp", "/workspace", "/dev/shm"):
        if places is not None:
            yield from ("--bind", f"{places}/{path.rpartition('/')[2]}", path)
        else:
            yield from ("--size", str(limits.tmpfs_bytes), "--perms", "1777", "--tmpfs", path)
    yield from (
        "--ro-bind",
        str(agent),
        f"{AGENT_AT}/agent",
        "--remount-ro",
        "/",
        "--chdir",
        "/workspace",
        "--",
    )
    yield from (program, *_agent(limits, {}))


def composed(limits: Limits, control: Control, places: Path, env: dict[str, str]) -> Iterator[str]:
    """Yields the command of a sandbox with a root of layers, which is mounted already.

    The agent lies in a mount of its own with its interpreter. An empty list of libraries to load first is
    mounted over the root's, which could have the agent's own loader take something in.
    """
    yield from namespaces()
    yield from ("--bind", f"{places}/root", "/", "--proc", "/proc", "--dev", "/dev")
    yield from ("--bind", f"{places}/shm", "/dev/shm", "--ro-bind", str(control.folder), AGENT_AT)
    yield from ("--ro-bind", str(control.library), f"{AGENT_AT}/lib/{control.library.name}")
    yield from ("--ro-bind", "/dev/null", "/etc/ld.so.preload", "--chdir", "/workspace", "--")
    yield from (*control.command(AGENT_AT), *_agent(limits, env))


def _agent(limits: Limits, env: dict[str, str]) -> list[str]:
    uid = COMMAND_UID if os.geteuid() == 0 else None
    alone = not {"memory", "pids"} <= controllers()
    return agent_command(AGENT_AT, limits, uid=uid, alone=alone, env=env)


def interpreter() -> tuple[str, tuple[str, ...]]:
    """Returns the interpreter of the sandbox and the mounts it needs: the system's, else our own."""
    if Path("/usr/bin/python3").exists():
        return "/usr/bin/python3", ()
    return os.path.realpath(sys.executable), ("--ro-bind", sys.base_prefix, sys.base_prefix)
