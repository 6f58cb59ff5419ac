"""Admission: the node has the last word on what it takes, and says at once and in kind why not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import PolicyError, RefusedError
from sandbox.types import SandboxSpec

_OVERCOMMIT = 4
"""Most sandboxes use little of the memory they may: limits may add up to so many times what there is."""


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
    """

    sandboxes: int = 512
    memory_bytes: int = 0
    reserve_bytes: int = 256 << 20
    starting: int = 64
    starts_at_once: int = 4


def admit(
    limits: NodeLimits, spec: SandboxSpec, held: Collection[SandboxSpec], starting: Collection[SandboxSpec]
) -> None:
    """Returns when `spec` fits beside what the node holds and starts.

    Raises:
        RefusedError: It does not.
        PolicyError: It never will.
    """
    budget = limits.memory_bytes or _OVERCOMMIT * _meminfo("MemTotal")
    if spec.limits.memory_bytes > budget:
        raise PolicyError(
            f"a sandbox of {spec.limits.memory_bytes >> 20} MiB is beyond the node's {budget >> 20} MiB"
        )
    if len(held) + len(starting) >= limits.sandboxes:
        raise RefusedError(f"the node holds its {limits.sandboxes} sandboxes", "sandboxes")
    if len(starting) >= limits.starting:
        raise RefusedError(f"{len(starting)} sandboxes are being started; try again", "start_rate")
    total = sum(s.limits.memory_bytes for s in (*held, *starting, spec))
    if total > budget:
        raise RefusedError(
            f"memory limits would add up to {total >> 20} of {budget >> 20} MiB: end some or ask for less",
            "memory",
        )
    if (free := _meminfo("MemAvailable")) < limits.reserve_bytes:
        raise RefusedError(f"the machine has only {free >> 20} MiB of memory left", "memory")
