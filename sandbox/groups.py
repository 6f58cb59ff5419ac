"""What a front does with warm pools: a claim goes to a node that has the whole group ready.

Heartbeats say how many sandboxes of which pool wait on each node. A group stays within one node; a node that
has too few after all, as the heartbeat was old, refuses and costs one more pick. When none has the group
ready it is started on one node, or refused, as the caller says.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sandbox.channel import Header
from sandbox.errors import PolicyError, RefusedError, SandboxError
from sandbox.placement import Demand, NodeView, Placer, Room, homes, offers
from sandbox.session import FALLBACKS, spec_from
from sandbox.warm_spec import pool_id, size

Send = Callable[[str, Header], Awaitable[tuple[Header, bytes]]]
"""Sends a request to a node by name."""


class Groups:
    """Picks nodes for groups."""

    def __init__(self, placer: Placer, tries: int, elsewhere: tuple[type[SandboxError], ...]):
        self._placer, self._tries, self._elsewhere = placer, tries, elsewhere

    async def claim(
        self, demand: Demand, header: Header, down: set[str], among: list[str] | None, send: Send
    ) -> tuple[Header, bytes]:
        """Sends a claim to nodes that have the group ready, then to those that have room to start it.

        Args:
            demand: What one sandbox of the group needs of a node.
            header: The claim.
            down: Nodes that do not answer.
            among: The nodes that may be asked, in their order; None stands for all.
            send: Sends it.

        Raises:
            RefusedError: No node has all of them ready (`pool`), or room for all of them.
        """
        count, fallback = size(header["count"], "claim"), header.get("fallback", "create")
        if fallback not in FALLBACKS:
            raise PolicyError(f"a claim falls back to {' or '.join(FALLBACKS)}, not {fallback!r}")
        ready = self.ready(demand, header, down)
        enough = [name for name in ready if ready[name] >= count and (among is None or name in among)]
        refusal: SandboxError | None = None
        for name in enough[: self._tries]:
            try:
                return await send(name, {**header, "fallback": "refuse"})
            except self._elsewhere as error:
                refusal = error
        if fallback == "create":
            return await self._fresh(demand, header, down, among, send)
        most = max(ready.values(), default=0)
        raise refusal or RefusedError(
            f"no node has {count} warm sandboxes of this kind ready, one has {most}, and a group stays on "
            "one; ask for fewer, or say fallback='create'",
            "pool",
        )

    async def _fresh(
        self, demand: Demand, header: Header, down: set[str], among: list[str] | None, send: Send
    ) -> tuple[Header, bytes]:
        count = int(header["count"])
        group = Demand(Room().plus(demand.room, count), demand.backend, demand.capabilities, demand.labels)
        tried: set[str] = set()
        left = None if among is None else [name for name in among if name not in down]
        refusal: SandboxError | None = None
        while len(tried) < self._tries:
            if left is None:
                name = self._placer.pick(group, time.monotonic(), down | tried)
            else:
                name = left.pop(0) if left else None
            if name is None:
                break
            tried.add(name)
            try:
                return await send(name, header)
            except self._elsewhere as error:
                refusal = error
        raise refusal or RefusedError(
            f"no node has room for {count} such sandboxes, and a group stays within one node", "sandboxes"
        )

    def home(self, demand: Demand, header: Header, owner: str, down: set[str]) -> str:
        """Returns the node that keeps sandboxes warm for an owner: the same each time it says how many.

        Raises:
            RefusedError: There is none.
        """
        names = [name for name in self._offering(demand) if name not in down]
        pool = pool_id(demand.backend, spec_from(header["spec"]))
        if not (found := homes(f"{owner} {pool}", names, 1)):
            raise RefusedError("no node of the kind that is asked for is there", "sandboxes")
        return found[0]

    def _offering(self, demand: Demand) -> Mapping[str, NodeView]:
        views: Mapping[str, NodeView] = self._placer.nodes
        return {name: view for name, view in views.items() if offers(view, demand) and not view.draining}

    def ready(self, demand: Demand, header: Header, down: set[str]) -> dict[str, int]:
        """Returns how many are ready of what a request asks for, by node, the least loaded first."""
        if not any(view.warm for view in self._placer.nodes.values()):
            return {}
        pool = pool_id(demand.backend, spec_from(header["spec"]))
        there = [(name, view.warm.get(pool, 0)) for name, view in self._offering(demand).items()]
        there.sort(key=lambda one: self._placer.load(one[0]))
        return {name: number for name, number in there if name not in down}


def group_reply(reply: Header, name: Callable[[str], str]) -> Header:
    """Returns a reply about several sandboxes with their names as the fleet has them."""
    about: list[dict[str, Any]] = reply.get("about", [])
    return {**reply, "about": [{**one, "box": name(one["box"])} for one in about]} if about else reply
