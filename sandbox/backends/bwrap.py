"""The command lines of bubblewrap: namespaces, what of the machine or of layers is the root, the agent."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from sandbox.backends.base import COMMAND_UID, DOOR, agent_command
from sandbox.backends.cgroups import controllers
from sandbox.backends.launch import GATE
from sandbox.layers.built_in import Control
from sandbox.layers.compose import NO_PRELOAD
from sandbox.types import Limits

AGENT_AT = "/run/tempering"
"""Where a sandbox has the agent, and in a composed root its interpreter."""

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_MASKED = (
    "/proc/kcore", "/proc/kmsg", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/latency_stats",
    "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/slabinfo", "/proc/vmallocinfo",
    "/proc/pagetypeinfo", "/proc/allocinfo", "/proc/acpi", "/proc/scsi", "/proc/sysrq-trigger",
    "/proc/dynamic_debug",     "/proc/mtrr", "/proc/vmcore", "/proc/asound",
)  # fmt: skip
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")


@functools.cache
def program() -> str:
    """Returns the path of bubblewrap; empty where it is not installed."""
    return shutil.which("bwrap") or ""


def namespaces() -> Iterator[str]:
    """Yields the program and what it keeps from the machine."""
    yield from (program(), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
    yield "--unshare-cgroup-try"
    yield from ("--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv")
    if os.geteuid() != 0:
        yield from ("--unshare-user", "--uid", str(COMMAND_UID), "--gid", str(COMMAND_UID))
    yield from ("--cap-drop", "ALL")
    if os.geteuid() == 0:
        for capability in _CAPABILITIES:
            yield from ("--cap-add", capability)


@functools.cache
def system() -> tuple[str, ...]:
    """Returns what makes the machine's own system a root, read-only."""
    return (*_system(), *masks())


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


@functools.cache
def masks() -> tuple[str, ...]:
    """Returns covers for what the kernel shows of itself, some to its root alone, which the agent is."""
    return tuple(_masks())


def _masks() -> Iterator[str]:
    yield from ("--ro-bind", "/proc/sys", "/proc/sys")  # writable to root without any capability
    for path in _MASKED:
        if os.path.isdir(path):
            yield from ("--size", "4096", "--tmpfs", path, "--remount-ro", path)
        elif os.path.exists(path):
            yield from ("--ro-bind", "/dev/null", path)


def terminals(places: Path) -> Iterator[str]:
    """Yields the place of the sandbox's own terminals, of which there is a limited number."""
    yield from ("--dev-bind", f"{places}/pts", "/dev/pts")


def plain(
    limits: Limits, agent: Path, places: Path | None, uid: int | None, door: Path | None
) -> Iterator[str]:
    """Yields the command of a sandbox whose root is the machine's own system.

    Args:
        limits: Of the sandbox.
        agent: The folder of the agent.
        places: Where its writable folders are mounted already; None to have bubblewrap make them.
        uid: The first user of its commands; None to run them as the agent's.
        door: Of its network, if it has one.
    """
    python, extra = interpreter()
    yield from namespaces()
    yield from system()
    yield from extra
    if places is not None:
        yield from terminals(places)
    for path in ("/tmp", "/workspace", "/dev/shm"):
        if places is not None:
            yield from ("--bind", f"{places}/{path.rpartition('/')[2]}", path)
        else:
            yield from ("--size", str(limits.tmpfs_bytes), "--perms", "1777", "--tmpfs", path)
    yield from _door(door)
    yield from ("--ro-bind", str(agent), f"{AGENT_AT}/agent", "--remount-ro", "/")
    yield from ("--block-fd", str(GATE), "--chdir", "/workspace", "--")
    yield from (python, *_agent(limits, {}, uid, door))


def composed(
    limits: Limits, control: Control, places: Path, env: dict[str, str], door: Path | None
) -> Iterator[str]:
    """Yields the command of a sandbox with a root of layers, which is mounted already.

    The agent lies in a mount of its own with its interpreter. An empty list of libraries to load first is
    mounted over the root's, which could have the agent's own loader take something in. Commands run as the
    user to whom the files of layers belong, which is the same in all sandboxes.
    """
    uid = COMMAND_UID if os.geteuid() == 0 else None
    yield from namespaces()
    yield from ("--bind", f"{places}/root", "/", "--proc", "/proc", "--dev", "/dev")
    yield from masks()
    yield from terminals(places)
    yield from ("--bind", f"{places}/shm", "/dev/shm", "--ro-bind", str(control.folder), AGENT_AT)
    yield from ("--ro-bind", str(control.library), f"{AGENT_AT}/lib/{control.library.name}")
    yield from _door(door)
    yield from ("--ro-bind", str(places.parent / NO_PRELOAD), "/etc/ld.so.preload")
    yield from ("--block-fd", str(GATE), "--chdir", "/workspace", "--")
    yield from (*control.command(AGENT_AT), *_agent(limits, env, uid, door))


def _door(door: Path | None) -> Iterator[str]:
    if door is not None:
        yield from ("--ro-bind", str(door), DOOR)


def _agent(limits: Limits, env: dict[str, str], uid: int | None, door: Path | None) -> list[str]:
    alone = not {"memory", "pids"} <= controllers()
    return agent_command(AGENT_AT, limits, uid=uid, alone=alone, network=door is not None, env=env)


@functools.cache
def interpreter() -> tuple[str, tuple[str, ...]]:
    """Returns the interpreter of the sandbox and the mounts it needs: the system's, else our own."""
    if Path("/usr/bin/python3").exists():
        return "/usr/bin/python3", ()
    return os.path.realpath(sys.executable), ("--ro-bind", sys.base_prefix, sys.base_prefix)
