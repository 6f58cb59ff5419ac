"""The node agent: the node of this machine, reachable by fronts over HTTP.

It wraps the node's own process, whose sandboxes outlive this one: killed and started again it finds them
as they were. On top of the node it has what a cluster needs: a name that every id begins with, a limit of
starts a second, draining, heartbeats with the requests under way, and the presence of owners whose clients
it cannot see. An owner counts as connected while a front has spoken for it within `ABSENT_S`; then the lease
that the node keeps begins to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandbox.about import rename
from sandbox.backends.base import AUTO
from sandbox.backends.registry import backends
from sandbox.channel import Header
from sandbox.connection import Connection, greet
from sandbox.errors import BackendMissingError, LostError, PolicyError, RefusedError, SandboxError
from sandbox.groups import group_reply
from sandbox.limiter import StartRate, start_rate
from sandbox.load import room_of
from sandbox.placement import Room
from sandbox.session import spec_from
from sandbox.shapes import MAX_LEASE_S, check_time
from sandbox.turns import Turns
from sandbox.warm_spec import Warm, pool_id
from sandbox.web import node_of
from sandbox.wire import Sink

ABSENT_S = 35.0
"""Three of a client's signs of life and a bit."""

MAX_OWNERS = 512
"""Of one project at a time."""

_TEND_S, _PROBE_S = 2.0, 60.0
_DRAINING = "draining"
OPERATIONS = frozenset(
    {
        "load", "present", "drain", "owners", "release", "find", "create", "attach", "run", "close", "boxes",
        "pause", "resume", "extend", "snapshot", "snapshots", "fork", "forget", "describe",
        "claim", "warm", "top", "denials",
    }
)  # fmt: skip
"""What a front may ask for."""

_STARTS = frozenset({"create", "fork", "claim"})
_LOG = logging.getLogger("sandbox.node_server")
_Reply = tuple[Header, bytes]


@dataclass(slots=True)
class _Owner:
    """An owner for whom a front speaks: the connection to the node that keeps its lease from running."""

    connection: Connection
    seen: float = field(default_factory=time.monotonic)
    calls: int = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A create under way: which front asked, under which number, for whom, and for how much."""

    front: str
    number: int
    owner: str
    room: Room


class NodeServer:
    """What a node agent does with a call; `temper sandbox node` serves it."""

    def __init__(
        self,
        name: str,
        state_dir: Path,
        labels: Mapping[str, str],
        starts_per_s: float = 0.0,
        absent_s: float = ABSENT_S,
        most_owners: int = MAX_OWNERS,
        warm: Sequence[Warm] = (),
    ):
        if not name or any(character in name for character in "./: \n") or len(name) > 63:
            raise PolicyError(
                f"a node's name has at most 63 characters and no dot, slash or colon: not {name!r}"
            )
        self.name, self._state_dir, self._labels = name, state_dir.expanduser().absolute(), dict(labels)
        self._starts_per_s, self._absent_s, self._most_owners = starts_per_s, absent_s, most_owners
        self._warm, self._pools = tuple(warm), bool(warm)
        self._control: Connection | None = None
        self._reaching = asyncio.Lock()
        self._owners: dict[str, _Owner] = {}
        self._turns = Turns()
        self._flights: set[_Flight] = set()
        self._rates: dict[str, StartRate] = {}
        self._offers: dict[str, dict[str, bool]] = {}
        self._probed = 0.0
        self._last: dict[str, float] = {}
        self._operations: dict[str, Callable[[Header], Awaitable[_Reply]]] = {
            "load": self._load, "present": self._present, "drain": self._drain, "owners": self._ask_control,
            "release": self._release, "find": self._find, "top": self._top,
        }  # fmt: skip

    @property
    def draining(self) -> bool:
        """Whether it takes no more sandboxes; a mark in the state folder, which a restart keeps."""
        return (self._state_dir / _DRAINING).exists()

    async def start(self) -> None:
        """Starts the node unless it runs, and looks which backends it has.

        Raises:
            BackendMissingError: None.
            InfrastructureError: The node does not start.
        """
        await self._probe()
        if not self._offers:
            raise BackendMissingError(
                f"{self.name} has no sandbox backend; `temper doctor` says what is missing"
            )

    async def tend(self) -> None:
        """Lets the leases of owners run of whom nothing is heard, and keeps the node alive."""
        while True:
            await asyncio.sleep(min(_TEND_S, self._absent_s))
            now = time.monotonic()
            for name, owner in list(self._owners.items()):
                if owner.connection.lost or (not owner.calls and now - owner.seen > self._absent_s):
                    await self._leave(name)
            try:
                if now - self._probed > _PROBE_S or self._control is None or self._control.lost:
                    await self._probe()
            except SandboxError as error:
                _LOG.warning("the node cannot be reached: %s", error)

    async def close(self) -> None:
        """Lets go of the node; what owners have there stays until their leases end."""
        for name in list(self._owners):
            await self._leave(name)
        if self._control is not None:
            await self._control.close()

    def health(self) -> dict[str, Any]:
        """Returns whether the node behind this agent is there, and whether it takes sandboxes."""
        return {"ok": self._control is not None and not self._control.lost, "draining": self.draining}

    def samples(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yields what the agent knows of the node, for the metrics."""
        known = {"owners": len(self._owners), "creates": len(self._flights), "draining": self.draining}
        for what, value in {**known, **self._last}.items():
            yield (what,), float(value)

    async def perform(self, header: Header, body: bytes, sink: Sink) -> _Reply:
        """Performs a call of a front.

        Raises:
            SandboxError: What the node says, or the agent for it.
        """
        if (operation := self._operations.get(header["op"])) is not None:
            return await operation(header)
        owner = await self._owner(header)
        owner.calls += 1
        try:
            inner = {name: value for name, value in header.items() if name not in ("client", "flight")}
            for name in ("box", "snapshot"):
                if inner.get(name):
                    inner[name] = self._local(inner[name])
            async with self._admitted(header, owner):
                reply, data = await owner.connection.request(inner, body, sink)
            if header["op"] == "describe":
                data = rename(data, lambda name: f"{self.name}.{name}")
            return self._global(reply), data
        finally:
            owner.calls, owner.seen = owner.calls - 1, time.monotonic()

    @contextlib.asynccontextmanager
    async def _admitted(self, header: Header, owner: _Owner) -> AsyncGenerator[None]:
        if header["op"] not in _STARTS and not (header["op"] == "attach" and header.get("replay")):
            yield
            return
        if self.draining:
            raise RefusedError(f"node {self.name} is draining", "draining")
        backend = header.get("backend") or await self._backend_of(self._local(header["box"]), owner)
        if backend not in self._offers:
            raise BackendMissingError(f"node {self.name} has no backend {backend!r}")
        if not await self._waits(header, backend):
            rate = self._rates.setdefault(backend, start_rate(backend, self._starts_per_s))
            rate.take(time.monotonic(), int(header.get("count", 1)))
        flight = self._flight(header)
        self._flights |= {flight} if flight else set()
        try:
            yield
        finally:
            self._flights -= {flight} if flight else set()

    async def _waits(self, header: Header, backend: str) -> bool:
        """Whether what is asked for waits in a warm pool, so that nothing needs to be started."""
        if header["op"] == "claim" and header.get("fallback") == "refuse":
            return True
        if not self._pools or header.get("snapshot") or "spec" not in header:
            return False
        load, _ = await self._ask_control({"op": "load"})
        return load["warm"].get(pool_id(backend, spec_from(header["spec"])), 0) >= header.get("count", 1)

    async def _backend_of(self, box: str, owner: _Owner) -> str:
        known: dict[str, str] = (await owner.connection.request({"op": "boxes"}))[0]["backends"]
        return known.get(
            box, next(iter(self._offers))
        )  # that of one that is gone is known to its journal only

    def _flight(self, header: Header) -> _Flight | None:
        if (mark := header.get("flight")) is None or header["op"] not in ("create", "claim"):
            return None
        room = Room().plus(room_of(spec_from(header["spec"])), int(header.get("count", 1)))
        return _Flight(mark["front"], mark["number"], header["client"]["owner"], room)

    def _usual(self) -> str:
        """Returns the backend to greet the node with; where `auto` stands for nothing, one that it has."""
        return "auto" if not self._offers or {*AUTO} & self._offers.keys() else next(iter(self._offers))

    async def _owner(self, header: Header) -> _Owner:
        name, lease_s = (
            str(header["client"]["owner"]),
            check_time(header["client"]["lease_s"], "lease_s", 0.0, MAX_LEASE_S),
        )
        async with self._turns.of(name):
            if (known := self._owners.get(name)) is not None and known.connection.lost:
                await self._leave(name)
            if (owner := self._owners.get(name)) is None:
                self._admit_owner(name.partition(":")[0])
                hello = {"op": "hello", "owner": name, "backend": self._usual(), "lease_s": lease_s}
                connection, _ = await greet(self._state_dir, hello)
                owner = self._owners[name] = _Owner(connection)
            owner.seen = time.monotonic()
            return owner

    def _admit_owner(self, project: str) -> None:
        """Returns when a project may have one more owner here: each holds a connection to the node."""
        if sum(name.partition(":")[0] == project for name in self._owners) >= self._most_owners:
            raise RefusedError(
                f"{self._most_owners} owners of project {project} are on node {self.name} already: "
                "share one, or wait until some have gone",
                "busy",
            )

    async def _leave(self, name: str) -> None:
        if (owner := self._owners.pop(name, None)) is not None:
            await owner.connection.close()

    async def _probe(self) -> None:
        await self._reached()
        offers: dict[str, dict[str, bool]] = {}
        for backend in backends():
            hello = {"op": "hello", "owner": "node agent", "backend": backend, "lease_s": 0.0}
            try:
                probe, welcome = await greet(self._state_dir, hello)
            except BackendMissingError:
                continue
            offers[backend] = welcome["capabilities"]
            await probe.close()
        self._offers, self._probed = offers, time.monotonic()

    async def _ask_control(self, header: Header) -> _Reply:
        control = await self._reached()
        return await control.request({name: header[name] for name in header if name != "client"})

    async def _reached(self) -> Connection:
        async with self._reaching:
            if self._control is not None and self._control.lost:
                await self._control.close()
                self._control = None
            if self._control is None:
                control, _ = await greet(self._state_dir, {"op": "ping"})
                try:
                    await self._prepare(control)
                except BaseException:
                    await control.close()
                    raise
                self._control = control
            return self._control

    async def _prepare(self, node: Connection) -> None:
        """Tells a node that may just have been started what it keeps warm, unless it drains."""
        if self.draining:
            await node.request({"op": "hold_back", "on": True})
        names: list[str] = []
        for one in self._warm:
            want = {"op": "warm", "spec": asdict(one.spec), "backend": one.backend, "count": one.count}
            names.append((await node.request(want))[0]["pool"])
        await node.request({"op": "keep_warm", "pools": names})

    async def _load(self, header: Header) -> _Reply:
        load, _ = await self._ask_control({"op": "load"})
        used, self._pools = Room(*load["used"]), bool(load["pools"])
        self._last = {
            "sandboxes": used.sandboxes,
            "memory_bytes": used.memory_bytes,
            "starting": load["starting"],
            **{f"denied_{reason}": count for reason, count in load["denials"].items()},
            "warm": sum(load["warm"].values()),
            "reaped": load["reaper"]["removed"],
        }
        owners = {name: Room(*amounts) for name, amounts in load["owners"].items()}
        for flight in self._flights:
            owners[flight.owner] = owners.get(flight.owner, Room()).plus(flight.room)
        mine = [flight.number for flight in self._flights if flight.front == header.get("front")]
        about: Header = {
            "name": self.name, "labels": self._labels, "backends": self._offers, "flights": mine,
            "owners": owners, "draining": self.draining or load["draining"],
        }  # fmt: skip
        return {**load, **about}, b""

    async def _present(self, header: Header) -> _Reply:
        await self._owner(header)
        return {}, b""

    async def _drain(self, header: Header) -> _Reply:
        mark = self._state_dir / _DRAINING
        if header.get("on", True):
            mark.touch()
        else:
            mark.unlink(missing_ok=True)
        await self._ask_control({"op": "hold_back", "on": self.draining})
        return {"draining": self.draining}, b""

    async def _release(self, header: Header) -> _Reply:
        reply = await self._ask_control(header)
        await self._leave(str(header["owner"]))
        return reply

    async def _top(self, header: Header) -> _Reply:
        rows = (await self._ask_control({"op": "top"}))[0]["rows"]
        return {"rows": [{**row, "id": f"{self.name}.{row['id']}"} for row in rows]}, b""

    async def _find(self, header: Header) -> _Reply:
        owner = await self._owner(header)
        keys: dict[str, str] = (await owner.connection.request({"op": "boxes"}))[0]["keys"]
        found = keys.get(str(header["key"]), "")
        return {"box": f"{self.name}.{found}" if found else ""}, b""

    def _local(self, name: str) -> str:
        if node_of(name) != self.name:
            raise LostError(f"{name} is not of node {self.name}")
        return name.partition(".")[2]

    def _global(self, reply: Header) -> Header:
        named: dict[str, Any] = {}
        for one, many in (("box", "boxes"), ("snapshot", "snapshots")):
            if reply.get(one):
                named[one] = f"{self.name}.{reply[one]}"
            if many in reply:
                named[many] = [f"{self.name}.{name}" for name in reply[many]]
        return group_reply({**reply, **named}, lambda name: f"{self.name}.{name}")
