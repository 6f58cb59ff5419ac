"""What a node says of its load: amounts that a front can place by."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

from sandbox.admission import NodeLimits, capacity
from sandbox.placement import Room
from sandbox.types import SandboxSpec


def room_of(spec: SandboxSpec) -> Room:
    """Returns what a sandbox takes of a node, by its limits."""
    return Room(1, spec.limits.memory_bytes, spec.limits.cpus, spec.limits.pids)


def load_of(
    limits: NodeLimits,
    held: Iterable[tuple[str, SandboxSpec]],
    starting: Collection[SandboxSpec],
    *,
    warm: Iterable[SandboxSpec] = (),
    hints: Iterable[tuple[str, SandboxSpec]] = (),
    draining: bool,
) -> dict[str, Any]:
    """Returns a node's load as JSON values.

    Args:
        limits: What it admits.
        held: Its sandboxes, with their owners.
        starting: Those that wait for their start or are being started.
        warm: What waits in warm pools, or is on its way out of them.
        hints: What is kept warm on behalf of owners, whose quotas it counts in.
        draining: Whether it takes no more.
    """
    owners: dict[str, Room] = {}
    for owner, spec in held:
        owners[owner] = owners.get(owner, Room()).plus(room_of(spec))
    used = Room()
    for room in (*owners.values(), *map(room_of, (*starting, *warm))):
        used = used.plus(room)
    for owner, spec in hints:
        owners[owner] = owners.get(owner, Room()).plus(room_of(spec))
    return {
        "capacity": capacity(limits),
        "used": used,
        "owners": owners,
        "starting": len(starting),
        "starting_limit": limits.starting,
        "draining": draining,
        "cores": os.cpu_count() or 1,
    }
