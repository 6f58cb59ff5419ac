"""What each sandbox of a node uses right now, for who operates it: by control group, of either version.

Asking changes nothing: a sandbox that is only looked at becomes no less idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sandbox.types import SandboxSpec

if TYPE_CHECKING:
    from sandbox.box import Box
    from sandbox.node import Node

_FOLDERS = ("workspace", "tmp", "dev/shm")
_CPU = ("cpuacct", "cpu")


class Usage(NamedTuple):
    """Amounts in use; None is what cannot be known here."""

    cpu_s: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None


def read(groups: Mapping[str, Path]) -> Usage:
    """Returns what the processes in control groups (folders by controller) use."""
    memory, pids = groups.get("memory"), groups.get("pids")
    return Usage(
        _cpu(groups),
        _number(memory, "memory.current", "memory.usage_in_bytes"),
        _number(pids, "pids.current"),
        _disk(pids),
    )


def _cpu(groups: Mapping[str, Path]) -> float | None:
    for controller in _CPU:
        if (folder := groups.get(controller)) is None:
            continue
        if (nanoseconds := _number(folder, "cpuacct.usage")) is not None:
            return nanoseconds / 1e9
        with contextlib.suppress(OSError, ValueError):
            words = (folder / "cpu.stat").read_text().split()
            return int(words[words.index("usage_usec") + 1]) / 1e6
    return None


def _number(folder: Path | None, *files: str) -> int | None:
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            if folder is not None:
                return int((folder / file).read_text())
    return None


def _disk(folder: Path | None) -> int | None:
    """Returns what the writable folders hold, seen through a process of the sandbox (takes root)."""
    with contextlib.suppress(OSError, ValueError):
        process = (folder / "cgroup.procs").read_text().split()[-1] if folder else ""
        devices: dict[int, int] = {}
        for name in _FOLDERS:
            path = f"/proc/{process}/root/{name}"
            with contextlib.suppress(FileNotFoundError):
                room, device = os.statvfs(path), os.stat(path, follow_symlinks=False).st_dev
                devices[device] = (room.f_blocks - room.f_bfree) * room.f_frsize
        return sum(devices.values()) if process else None
    return None


async def rows(node: Node) -> list[dict[str, Any]]:
    """Returns a row for each sandbox of a node, those that are just being started or wait included."""
    boxes = [*node.living.values(), *node.warm.boxes()]
    used = await asyncio.to_thread(lambda: [read(box.started.groups()) for box in boxes])
    starting = [_row(name, owner, "starting", spec) for name, (owner, spec) in node.births.starting.items()]
    return [_of(node, box, usage) for box, usage in zip(boxes, used, strict=True)] + starting


def _of(node: Node, box: Box, usage: Usage) -> dict[str, Any]:
    now, tenant = time.monotonic(), node.tenants.get(box.owner)
    state = "warm" if not box.owner else "paused" if box.resident.clocks.held else "running"
    idle = 0.0 if box.running else now - box.used
    lease = None if tenant is None else tenant.left()
    return {
        **_row(box.id, box.owner, state, box.spec), **usage._asdict(), "backend": box.backend,
        "age_s": now - box.born, "commands": box.running, "at_s": now,
        "ttl_left_s": None if not box.owner else max(box.ttl_s - idle, 0.0), "lease_left_s": lease,
    }  # fmt: skip


def _row(name: str, owner: str, state: str, spec: SandboxSpec) -> dict[str, Any]:
    return {
        "id": name, "owner": owner, "state": state, "memory_limit": spec.limits.memory_bytes,
        "process_limit": spec.limits.pids, "backend": "", "age_s": 0.0, "commands": 0, "ttl_left_s": None,
        "lease_left_s": None, "at_s": time.monotonic(), **Usage()._asdict(),
    }  # fmt: skip
