"""Admission: the node has the last word on what it takes, and says at once and in kind why not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import PolicyError, RefusedError
from sandbox.placement import Room
from sandbox.types import SandboxSpec

_OVERCOMMIT = 4
"""Most sandboxes use little of the memory they may: limits may add up to so many times what there is."""

_CPU_OVERCOMMIT = 256
"""Nine in ten use less than a twentieth of the cores they may, and groups start by the hundred."""


_STARTS_PER_CORE = 8
"""An engine takes no more on quiet cores; on busy ones each start that is under way has a share of them."""

_LEAST = {
    "cpus": 0.01, "memory_bytes": 8 << 20, "pids": 4, "tmpfs_bytes": 1 << 12, "tmpfs_inodes": 16,
    "open_files": 16,
    "disk_bytes": 0,
}  # fmt: skip
_MOST = 1 << 62


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"/proc/meminfo has no {name}")


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """What a node admits.

    Attributes:
        sandboxes: At once.
        memory_bytes: What their memory limits may add up to; 0 stands for four times the machine's memory.
        reserve_bytes: Memory that stays free on the machine.
        starting: Sandboxes that wait for their start or are being started.
        starts_at_once: Of these, how many are being started at the same time.
        cpus: What their limits of cores may add up to; 0 stands for 256 times the machine's.
        pids: What their limits of processes may add up to; 0 stands for the kernel's number of processes.
        reserve_disk_bytes: Room that stays free where the state folder is.
    """

    sandboxes: int = 512
    memory_bytes: int = 0
    reserve_bytes: int = 256 << 20
    starting: int = 256
    starts_at_once: int = _STARTS_PER_CORE * (os.cpu_count() or 1)
    cpus: float = 0.0
    pids: int = 0
    reserve_disk_bytes: int = 256 << 20


def admit(
    limits: NodeLimits,
    spec: SandboxSpec,
    held: Collection[SandboxSpec],
    starting: Collection[SandboxSpec],
    state_dir: Path,
) -> None:
    """Returns when `spec` fits beside what the node holds and starts.

    Raises:
        RefusedError: It does not.
        PolicyError: It never will.
    """
    _check_limits(spec)
    budget = limits.memory_bytes or _OVERCOMMIT * _meminfo("MemTotal")
    if spec.limits.memory_bytes > budget:
        raise PolicyError(
            f"a sandbox of {spec.limits.memory_bytes >> 20} MiB is beyond the node's {budget >> 20} MiB"
        )
    if len(held) + len(starting) >= limits.sandboxes:
        raise RefusedError(f"the node holds its {limits.sandboxes} sandboxes", "sandboxes")
    if len(starting) >= limits.starting:
        raise RefusedError(f"{len(starting)} sandboxes are being started; try again", "start_rate")
    _admit_sums(limits, spec, (*held, *starting, spec))
    check_disk(limits, state_dir)
    total = sum(s.limits.memory_bytes for s in (*held, *starting, spec))
    if total > budget:
        raise RefusedError(
            f"memory limits would add up to {total >> 20} of {budget >> 20} MiB: end some or ask for less",
            "memory",
        )
    if (free := _meminfo("MemAvailable")) < limits.reserve_bytes:
        raise RefusedError(f"the machine has only {free >> 20} MiB of memory left", "memory")


def check_disk(limits: NodeLimits, state_dir: Path) -> None:
    """Returns when something more may be kept where the state folder is.

    Raises:
        RefusedError: What is free there is the reserve (`disk`).
    """
    if (room := shutil.disk_usage(state_dir).free) < limits.reserve_disk_bytes:
        raise RefusedError(f"the disk of {state_dir} has only {room >> 20} MiB left", "disk")


def _check_limits(spec: SandboxSpec) -> None:
    """A limit of nothing, or less, is none at all to a kernel or an engine, and would lower sums here."""
    limits = {name: getattr(spec.limits, name) for name in _LEAST}
    for name, least in _LEAST.items():
        value = limits[name]
        if not (type(value) in (int, float) and least <= value < _MOST):
            raise PolicyError(f"limits.{name} is at least {least} and below {_MOST}, not {value!r:.40}")
    if not (type(spec.ttl_s) in (int, float) and 0 < spec.ttl_s < _MOST):
        raise PolicyError(f"ttl_s is above 0 and below {_MOST} seconds, not {spec.ttl_s!r:.40}")


def _admit_sums(limits: NodeLimits, spec: SandboxSpec, together: Collection[SandboxSpec]) -> None:
    cpus = limits.cpus or _CPU_OVERCOMMIT * (os.cpu_count() or 1)
    pids = limits.pids or int(Path("/proc/sys/kernel/pid_max").read_text())
    if spec.limits.cpus > cpus or spec.limits.pids > pids:
        raise PolicyError(
            f"a sandbox of {spec.limits.cpus} cores and {spec.limits.pids} processes is beyond the node's "
            f"{cpus} and {pids}"
        )
    if (cores := sum(s.limits.cpus for s in together)) > cpus:
        raise RefusedError(f"limits of cores would add up to {cores:g} of {cpus:g}", "cpu")
    if (processes := sum(s.limits.pids for s in together)) > pids:
        raise RefusedError(f"limits of processes would add up to {processes} of {pids}", "pids")


def capacity(limits: NodeLimits) -> Room:
    """Returns all that a node gives away."""
    return Room(
        limits.sandboxes,
        limits.memory_bytes or _OVERCOMMIT * _meminfo("MemTotal"),
        limits.cpus or _CPU_OVERCOMMIT * (os.cpu_count() or 1),
        limits.pids or int(Path("/proc/sys/kernel/pid_max").read_text()),
    )
