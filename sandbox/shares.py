"""A project's quota at the node: the last word on it is where the sandboxes are.

A front says with each create what the project and those above it may hold, and what it knows them to hold on
other nodes. The node adds what it holds itself, to the last sandbox under way, whichever front asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.errors import RefusedError
from sandbox.load import room_of
from sandbox.placement import NOTHING, Room
from sandbox.tokens import Quota, within
from sandbox.types import SandboxSpec


@dataclass(frozen=True, slots=True)
class Share:
    """What a project may hold, and what of it is elsewhere."""

    project: str
    quota: Quota
    elsewhere: Room

    def wire(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {"project": self.project, "quota": self.quota.model_dump(), "elsewhere": self.elsewhere}


def shares_from(data: Iterable[Any]) -> tuple[Share, ...]:
    """Returns the shares that a front sent."""
    return tuple(
        Share(str(one["project"]), Quota.model_validate(one["quota"]), Room(*one["elsewhere"]))
        for one in data
    )


def check(
    shares: Sequence[Share], spec: SandboxSpec, count: int, held: Iterable[tuple[str, SandboxSpec]]
) -> None:
    """Returns when `count` more of `spec` fit into all shares.

    Args:
        shares: Of a project and all above it.
        spec: What is asked for.
        count: How many of it.
        held: What the node has, by owner (`project:owner`), with what it is starting.

    Raises:
        RefusedError: They do not (`quota`).
    """
    if not shares:
        return
    projects: dict[str, Room] = {}
    for owner, one in held:
        project = owner.partition(":")[0]
        projects[project] = projects.get(project, NOTHING).plus(room_of(one))
    for share in shares:
        total = share.elsewhere.plus(room_of(spec), count)
        for project, room in projects.items():
            total = total.plus(room) if within(project, share.project) else total
        if over := share.quota.exceeded(total):
            raise RefusedError(f"the quota of project {share.project} would be passed: {over}", "quota")
