"""The front: the stateless entry to a fleet of nodes, of which there can be any number side by side.

It keeps no record of sandboxes: an id names its node, heartbeats say how full the nodes are, and what a
restart loses is rebuilt within one heartbeat. A create goes to the node that placement picks; a node that
refuses or does not answer costs one more pick. A create with a key has its own short list of nodes, in an
order that follows from the key, so that every front finds what another one made.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import aiohttp

from sandbox.backends.base import AUTO
from sandbox.channel import Header
from sandbox.demands import demand_of, operate, owner_of, signed
from sandbox.errors import (
    BackendMissingError,
    InfrastructureError,
    LostError,
    PolicyError,
    RefusedError,
    SandboxError,
    StartTimeoutError,
)
from sandbox.groups import Groups
from sandbox.node_list import changed, read_nodes
from sandbox.placement import Demand, NodeView, Placer, Room
from sandbox.quotas import Ledger
from sandbox.session import spec_from
from sandbox.shapes import check_forks
from sandbox.tokens import Access, Principal
from sandbox.types import Capabilities
from sandbox.warm_spec import size
from sandbox.web import Caller, node_of
from sandbox.wire import Sink

TRIES = 4
"""Nodes that are asked before a create is given back, and on which a create with a key is looked for."""

HEARTBEAT_S = 1.0
_PATIENCE_S, _GIVE_UP_S = 5.0, 60.0
_ELSEWHERE = (RefusedError, LostError, StartTimeoutError, InfrastructureError, BackendMissingError)
"""What one node says and another may not."""

_USUAL = {field.name: field.default for field in fields(Capabilities) if field.default is not MISSING}
"""What a node of an earlier version does not say of a backend."""

_LOG = logging.getLogger("sandbox.server")
_Reply = tuple[Header, bytes]


@dataclass(slots=True)
class _Node:
    """A node of the list: how it is reached, and since when it has not answered."""

    name: str
    caller: Caller
    heard_s: float
    beat: asyncio.Task[None] | None = None
    down: bool = True


class Front:
    """What a front does with a call; `temper sandbox serve` serves it."""

    def __init__(
        self, nodes: Path, access: Access, node_token: str, *, choices: int = 2, seed: int | None = None
    ):
        self._list, self._listed, self._token = nodes, 0, node_token
        self._id = secrets.token_hex(8)
        self._nodes: dict[str, _Node] = {}
        self._session: aiohttp.ClientSession | None = None
        self.placer = Placer(random.randrange(1 << 32) if seed is None else seed, choices)
        self._ledger, self._groups = Ledger(access.quotas), Groups(self.placer, TRIES, _ELSEWHERE)
        self.refusals: dict[str, int] = {}
        self.repicks = 0
        box = ("run", "attach", "close", "pause", "resume", "extend", "snapshot", "denials")
        self._operations: dict[str, Callable[..., Awaitable[_Reply]]] = {
            **dict.fromkeys(box, self._forward), "fork": self._fork, "forget": self._forward,
            "create": self._create, "hello": self._hello, "boxes": self._gather, "snapshots": self._gather,
            "describe": self._describe, "release": self._release, "present": self._present,
            "owners": self._owners, "ping": self._ping, "stats": self._stats, "drain": self._drain,
            "claim": self._claim, "warm": self._warm, "top": self._top,
        }  # fmt: skip

    @property
    def operations(self) -> frozenset[str]:
        """What can be asked for."""
        return frozenset(self._operations)

    async def start(self) -> None:
        """Reads the list of nodes and hears of each once, as far as they answer.

        Raises:
            PolicyError: The list cannot be read.
        """
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._read_list()
        await asyncio.gather(*(self._ask(node) for node in self._nodes.values()))

    async def tend(self) -> None:
        """Hears of every node each `HEARTBEAT_S`, and follows changes of the list."""
        try:
            while True:
                try:
                    self._read_list()
                except PolicyError as error:
                    _LOG.error("%s; the nodes stay those that they were", error)
                for node in self._nodes.values():
                    if node.beat is None or node.beat.done():
                        node.beat = asyncio.create_task(self._ask(node))
                await asyncio.sleep(HEARTBEAT_S * random.uniform(0.9, 1.1))
        finally:
            for node in self._nodes.values():
                if node.beat is not None:
                    node.beat.cancel()

    async def close(self) -> None:
        """Lets go of the nodes."""
        if self._session is not None:
            await self._session.close()

    async def act(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        """Performs a call of a client.

        Raises:
            SandboxError: It cannot be done; the kind says why.
        """
        return await self._operations[header["op"]](who, header, body, sink)

    def health(self) -> dict[str, Any]:
        """Returns whether any node answers, and how many do."""
        up = len(self._nodes) - len(self._down())
        return {"ok": up > 0, "nodes": len(self._nodes), "up": up}

    def node_samples(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yields what is known of the nodes, for the metrics."""
        for name, view in self.placer.nodes.items():
            for what, value in {**view.amounts(), "down": self._nodes[name].down}.items():
                yield (name, what), float(value)

    # --- nodes

    def _read_list(self) -> None:
        now = changed(self._list)
        if now == self._listed:
            return
        listed = read_nodes(self._list)
        for name in {*self._nodes} - {*listed}:
            node = self._nodes.pop(name)
            if node.beat is not None:
                node.beat.cancel()
            self._forget(name)
        for name, url in listed.items():
            if name not in self._nodes or self._nodes[name].caller.url != url:
                self._nodes[name] = _Node(name, Caller(url, self._token, self._session), time.monotonic())
        self._listed = now

    async def _ask(self, node: _Node) -> None:
        taken = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                load, _ = await node.caller.request({"op": "load", "front": self._id})
            if load["name"] != node.name:
                raise InfrastructureError(f"{node.caller.url} is node {load['name']}, not {node.name}")
        except (SandboxError, TimeoutError) as error:
            if not node.down:
                _LOG.warning("node %s is not to be reached: %s", node.name, error or "it is silent")
            node.down = True
            if taken - node.heard_s > _GIVE_UP_S:
                self._forget(node.name)
            return
        if self._nodes.get(node.name) is node:
            node.down, node.heard_s = False, taken
            self._hear(load, taken)

    def _hear(self, load: Header, taken: float) -> None:
        capable = {
            name: frozenset(capability for capability, there in {**_USUAL, **held}.items() if there)
            for name, held in load["backends"].items()
        }
        self.placer.observe(
            NodeView(
                load["name"], taken, Room(*load["capacity"]), Room(*load["used"]), load["starting"],
                load["starting_limit"], frozenset(load["flights"]), capable, load["labels"], load["draining"],
                load.get("warm", {}),
            )
        )  # fmt: skip
        held: dict[str, Room] = {}
        for owner, amounts in load["owners"].items():
            project = owner.partition(":")[0]
            held[project] = held.get(project, Room()).plus(Room(*amounts))
        self._ledger.report(load["name"], held)

    def _forget(self, name: str) -> None:
        self.placer.forget(name)
        self._ledger.report(name, {})

    def _node(self, name: str) -> _Node:
        if (node := self._nodes.get(name)) is None:
            raise LostError(
                f"the fleet has no node {name}; its sandboxes are gone or belong to another fleet"
            )
        return node

    async def _forward(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        node = self._node(node_of(str(header.get("box") or header["snapshot"])))
        if header["op"] != "attach":
            return await node.caller.request(signed(who, header), body, sink)
        try:  # it may be made anew, which the quota has to allow
            return await node.caller.request(self._shared(node.name, who, header), body, sink)
        except RefusedError as error:
            if error.reason != "quota":
                raise
        await self._hear_anew(who)  # what has ended since the last heartbeats is not held any more
        return await node.caller.request(self._shared(node.name, who, header), body, sink)

    async def _fork(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        name, count = node_of(str(header["box"])), check_forks(header["count"])
        self._node(name)
        room = Room(sandboxes=count)
        await self._charge(who, room)
        return await self._send(name, room, who, header, body, sink)

    async def _create(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        demand, header = self._asked(header)
        await self._charge(who, demand.room)
        if snapshot := header.get("snapshot"):
            node = self._node(node_of(str(snapshot)))
            return await self._send(node.name, demand.room, who, header, body, sink)
        if header.get("key"):
            return await self._create_once(who, demand, header, body, sink)
        return await self._pick(who, demand, header, body, sink)

    async def _pick(self, who: Principal, demand: Demand, header: Header, body: bytes, sink: Sink) -> _Reply:
        tried: list[str] = []
        refusal: SandboxError | None = None
        down = self._down()
        ready = {name for name, number in self._groups.ready(demand, header, down).items() if number}
        while len(tried) < TRIES:
            cold = {*self._nodes} - ready if ready - {*tried} else set[str]()
            name = self.placer.pick(demand, time.monotonic(), down | cold | {*tried})
            if name is None and cold:
                name = self.placer.pick(demand, time.monotonic(), down | {*tried})
            if name is None:
                break
            tried.append(name)
            try:
                return await self._send(name, demand.room, who, header, body, sink)
            except _ELSEWHERE as error:
                refusal = error
                self._count(error)
        raise refusal or self._nobody(demand)

    async def _create_once(
        self, who: Principal, demand: Demand, header: Header, body: bytes, sink: Sink
    ) -> _Reply:
        names = self._homes(who, demand, header)
        if (name := await self._found(who, header, header["key"], names)) is not None:
            return await self._node(name).caller.request(self._shared(name, who, header), body, sink)
        refusal: SandboxError | None = None
        for name in names:
            try:
                return await self._send(name, demand.room, who, header, body, sink)
            except _ELSEWHERE as error:
                refusal = error
                self._count(error)
        raise refusal or self._nobody(demand)

    def _homes(self, who: Principal, demand: Demand, header: Header) -> list[str]:
        key = f"{who.project}:{header['client']['owner']}:{header['key']}"
        return self.placer.homes(key, demand, TRIES)

    async def _found(self, who: Principal, header: Header, key: str, names: list[str]) -> str | None:
        """Returns the node that has what was made under a key."""
        find = {"op": "find", "key": key, "client": header["client"]}
        found = await asyncio.gather(
            *(self._node(name).caller.request(signed(who, find)) for name in names), return_exceptions=True
        )
        there = (
            name for name, got in zip(names, found, strict=True) if isinstance(got, tuple) and got[0]["box"]
        )
        return next(there, None)

    def _asked(self, header: Header) -> tuple[Demand, Header]:
        """Returns what a request needs of a node, and the request with the backend that it stands for."""
        spec = spec_from(header["spec"])
        if spec.backend:
            header = {**header, "backend": self._resolve(spec.backend)}
        return demand_of(spec, str(header["backend"])), header

    async def _claim(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        demand, header = self._asked(header)
        room = Room().plus(demand.room, size(header["count"], "claim"))
        names = None
        if header.get("key"):
            names = self._homes(who, demand, header)
            if (there := await self._found(who, header, f"{header['key']}/0", names)) is not None:
                return await self._node(there).caller.request(self._shared(there, who, header), body, sink)
        await self._charge(who, room)

        async def send(name: str, claim: Header) -> _Reply:
            try:
                return await self._send(name, room, who, claim, body, sink)
            except _ELSEWHERE as error:
                self._count(error)
                raise

        return await self._groups.claim(demand, header, self._down(), names, send)

    async def _warm(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        demand, header = self._asked(header)
        owner = f"{who.project}:{owner_of(header)}"
        name = self._groups.home(demand, header, owner, self._down())
        return await self._node(name).caller.request(self._shared(name, who, header), body, sink)

    async def _top(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        replies = await self._everywhere(self._nodes, {"op": "top"})
        rows = [row for _, reply in sorted(replies.items()) for row in reply["rows"]]
        seen = [row for row in rows if who.operator or who.oversees(row["owner"].partition(":")[0])]
        return {"rows": seen}, b""

    def _down(self) -> set[str]:
        return {name for name, node in self._nodes.items() if node.down}

    def _shared(self, name: str, who: Principal, header: Header) -> Header:
        """Returns a call for a node with what it needs to have the last word on the project's quotas."""

        def ahead(payer: str) -> Room:
            return self.placer.paid(payer).plus(self.placer.paid_at(name, payer), -1)

        shares = self._ledger.shares(who.project, name, ahead, self.placer.payers)
        return {**signed(who, header), "shares": shares}

    async def _send(
        self, name: str, room: Room, who: Principal, header: Header, body: bytes, sink: Sink
    ) -> _Reply:
        node, admitted = self._node(name), False
        known = name in self.placer.nodes
        call = self._shared(name, who, header)
        number = self.placer.begin(name, room, who.project) if known else 0
        mark = {"flight": {"front": self._id, "number": number}}
        try:
            reply = await node.caller.request({**call, **mark}, body, sink)
            admitted = True
            return reply
        except LostError:
            node.down = True  # until it is heard of again
            raise
        finally:
            self.placer.end(number, time.monotonic(), admitted=admitted)

    async def _charge(self, who: Principal, room: Room) -> None:
        try:
            self._ledger.check(who.project, room, self.placer.paid, self.placer.payers)
        except RefusedError:
            await self._hear_anew(who)
            self._ledger.check(who.project, room, self.placer.paid, self.placer.payers)

    async def _hear_anew(self, who: Principal) -> None:
        await asyncio.gather(*(self._refresh(name) for name in self._ledger.nodes(who.project)))

    async def _refresh(self, name: str) -> None:
        node = self._nodes[name]
        if node.beat is not None and not node.beat.done():
            await asyncio.wait([node.beat])  # it may have been asked before
        if node.beat is None or node.beat.done():
            node.beat = asyncio.create_task(self._ask(node))
        await asyncio.wait([node.beat])

    def _count(self, error: SandboxError) -> None:
        reason = error.reason if isinstance(error, RefusedError) else type(error).__name__
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        self.repicks += 1

    def _nobody(self, demand: Demand) -> SandboxError:
        views = self.placer.nodes.values()
        if not views:
            return InfrastructureError(f"no node of {self._list} has answered yet")
        roomy = [view for view in views if demand.room.within(view.capacity)]
        if not any(self.placer.homes("", demand, 1)) or not roomy:
            return PolicyError(
                f"no node of this fleet is of the kind that is asked for: backend {demand.backend}, "
                f"labels {dict(demand.labels)}, capabilities {sorted(demand.capabilities)}, "
                f"{demand.room.memory_bytes >> 20} MiB and {demand.room.cpus:g} cores"
            )
        if all(view.draining or self._nodes[view.name].down for view in views):
            return RefusedError("all nodes are draining or out of reach", "draining")
        return RefusedError("no node of the kind that is asked for has room", "sandboxes")

    async def _hello(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        owner_of(header)
        views = self.placer.nodes.values()
        backend = self._resolve(str(header["backend"]))
        sure = frozenset[str].intersection(
            *(view.backends[backend] for view in views if backend in view.backends)
        )
        capabilities = {field.name: field.name in sure for field in fields(Capabilities)}
        return {"backend": backend, "pid": os.getpid(), "capabilities": capabilities}, b""

    async def _describe(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        if header.get("box"):
            return await self._forward(who, header, body, sink)
        replies = await self._heard(self._nodes, signed(who, header))
        described = [entry for _, (_, data) in sorted(replies.items()) for entry in json.loads(data)]
        return {}, json.dumps(described).encode()

    def _resolve(self, wanted: str) -> str:
        """Returns the backend that `wanted`, or `auto`, stands for in this fleet."""
        offered = {name for view in self.placer.nodes.values() for name in view.backends}
        if not offered:
            raise InfrastructureError("none of the fleet's nodes has answered yet")
        named = AUTO if wanted == "auto" else (wanted,)
        backend = next((name for name in named if name in offered), "")
        if not backend:
            raise BackendMissingError(
                f"no node has the backend {wanted!r}; there are {', '.join(sorted(offered))}"
            )
        return backend

    async def _gather(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        what = header["op"]
        replies = await self._everywhere(self._nodes, signed(who, header))
        names = [name for _, reply in sorted(replies.items()) for name in reply[what]]
        return {what: names}, b""

    async def _release(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        project, colon, owner = str(header["owner"]).partition(":")
        if not colon:
            project, owner = who.project, project
        if not who.oversees(project):
            raise PolicyError(f"{who.name} has no say in project {project}")
        call = {"op": "release", "owner": f"{project}:{owner}"}
        replies = await self._everywhere(self._nodes, call)
        return {"sandboxes": sum(reply["sandboxes"] for reply in replies.values())}, b""

    async def _present(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        await self._everywhere(map(str, header["nodes"]), signed(who, header))
        return {}, b""

    async def _owners(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        replies = await self._everywhere(self._nodes, {"op": "owners"})
        total: dict[str, dict[str, Any]] = {}
        for node, reply in sorted(replies.items()):
            for name, held in reply["owners"].items():
                if not who.oversees(name.partition(":")[0]):
                    continue
                entry = total.setdefault(name, {"sandboxes": 0, "clients": 0, "nodes": []})
                entry["sandboxes"] += held["sandboxes"]
                entry["clients"] = max(entry["clients"], held["clients"])
                entry["nodes"].append(node)
        return {"owners": total}, b""

    async def _ping(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        return {}, b""

    async def _stats(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        operate(who)
        views = sorted(self.placer.nodes.items())
        nodes = {name: {**view.about(), "down": self._nodes[name].down} for name, view in views}
        unheard = sorted({*self._nodes} - {*nodes})
        return {"nodes": nodes, "unheard": unheard, "refusals": self.refusals, "repicks": self.repicks}, b""

    async def _drain(self, who: Principal, header: Header, body: bytes, sink: Sink) -> _Reply:
        operate(who)
        node = self._node(str(header["node"]))
        reply = await node.caller.request({"op": "drain", "on": bool(header.get("on", True))})
        await self._ask(node)
        return reply

    async def _everywhere(self, names: Iterable[str], header: Header) -> dict[str, Header]:
        return {name: reply for name, (reply, _) in (await self._heard(names, header)).items()}

    async def _heard(self, names: Iterable[str], header: Header) -> dict[str, _Reply]:
        """Asks nodes at once; one that does not answer is left out: what it has ends with its leases."""
        nodes = [node for name in names if (node := self._nodes.get(name)) is not None]
        replies = await asyncio.gather(
            *(node.caller.request(header) for node in nodes), return_exceptions=True
        )
        heard: dict[str, _Reply] = {}
        for node, reply in zip(nodes, replies, strict=True):
            if isinstance(reply, LostError):
                _LOG.warning("node %s did not answer %s: %s", node.name, header["op"], reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                heard[node.name] = reply
        return heard
