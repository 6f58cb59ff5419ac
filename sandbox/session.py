"""One client's connection to a node: requests in, replies out, each request a task of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sandbox.about import describe
from sandbox.admission import check_disk
from sandbox.channel import Header, encode
from sandbox.errors import InfrastructureError, PolicyError, ProtocolError, SandboxError, to_wire
from sandbox.frames import FrameProtocol
from sandbox.policy import Network
from sandbox.recovery import Claim
from sandbox.shapes import MAX_LEASE_S, MAX_LIFE_S, check_forks, check_owner, check_spec, check_time
from sandbox.shares import shares_from
from sandbox.types import Limits, SandboxSpec
from sandbox.usage import rows
from sandbox.versions import API, UNSAID, reply_for, served

if TYPE_CHECKING:
    from sandbox.box import Box
    from sandbox.node import Node, Owner

_LOG = logging.getLogger("sandbox.node")
_Reply = tuple[Header, bytes]
FALLBACKS = ("create", "refuse")
"""What becomes of a claim for which the warm pool has too few."""


class Session:
    """Serves one client; when it goes its commands are killed, and its owner's lease begins to run."""

    def __init__(self, node: Node, channel: FrameProtocol):
        self._node, self._channel = node, channel
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._owner = ""
        self._lease: Owner | None = None
        self._operations = {
            "ping": self._ping, "hello": self._hello, "create": self._create, "run": self._run,
            "attach": self._attach, "close": self._close, "boxes": self._boxes, "pause": self._pause,
            "resume": self._resume, "extend": self._extend, "snapshot": self._snapshot, "fork": self._fork,
            "snapshots": self._snapshots, "forget": self._forget, "release": self._release,
            "owners": self._owners,
            "load": self._load, "claim": self._claim, "warm": self._warm, "hold_back": self._hold_back,
            "keep_warm": self._keep_warm,
            "top": self._top, "describe": self._describe, "denials": self._denials,
        }  # fmt: skip

    def take(self, header: Header, body: bytes) -> None:
        """Begins to serve a request.

        Raises:
            ProtocolError: It is none.
        """
        number = header.get("id")
        if not isinstance(number, int) or number in self._tasks:
            raise ProtocolError(f"a request with the id {number!r}")
        if header.get("op") == "cancel":
            if task := self._tasks.get(header.get("target", 0)):
                task.cancel()
        else:
            self._tasks[number] = asyncio.create_task(self._answer(number, header, body))

    async def end(self) -> None:
        """Forgets the client."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._lease is not None:
            self._lease.leave()

    async def _answer(self, number: int, header: Header, body: bytes) -> None:
        try:
            reply, data = await self._perform(header, body)
            frame = encode({**reply, "id": number}, data)
        except SandboxError as error:
            frame = encode({"error": to_wire(error), "id": number})
        except Exception as error:  # whatever it is, whoever asked waits for an answer
            _LOG.exception("request %s failed", header.get("op"))
            problem = InfrastructureError(f"the node failed: {type(error).__name__}: {error}")
            frame = encode({"error": to_wire(problem), "id": number})
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            problem = InfrastructureError("the node gave up what this waited for; ask again")
            frame = encode({"error": to_wire(problem), "id": number})
        finally:
            self._tasks.pop(number, None)
        self._channel.write(frame)

    async def _perform(self, header: Header, body: bytes) -> _Reply:
        operation = self._operations.get(header.get("op", ""))
        if operation is None:
            raise ProtocolError(f"there is no operation {header.get('op')!r}")
        return await operation(header, body)

    async def _ping(self, header: Header, body: bytes) -> _Reply:
        return {}, b""

    async def _hello(self, header: Header, body: bytes) -> _Reply:
        backend = await self._node.pick(header["backend"])
        if self._owner:
            raise ProtocolError("a client has one owner")
        version = served(header.get("version", UNSAID))
        lease_s = check_time(header["lease_s"], "lease_s", 0.0, MAX_LEASE_S)
        owner = check_owner(str(header["owner"]))
        self._lease = self._node.join(owner, lease_s)
        self._owner = owner
        capabilities = asdict(backend.capabilities())
        about: Header = {"backend": backend.name, "pid": os.getpid(), "version": API}
        about |= {"lease_s": self._lease.lease_s, "capabilities": capabilities}
        return reply_for(version, about), b""

    async def _create(self, header: Header, body: bytes) -> _Reply:
        spec = spec_from(header["spec"])
        key, snapshot = str(header.get("key", "")), str(header.get("snapshot", ""))
        shares = shares_from(header.get("shares", ()))
        box = await self._node.births.create(
            self._who(), await self._backend(header, spec), spec, key, snapshot, shares
        )
        return self._about(box), b""

    async def _claim(self, header: Header, body: bytes) -> _Reply:
        fallback = header.get("fallback", "create")
        if fallback not in FALLBACKS:
            raise PolicyError(f"a claim falls back to {' or '.join(FALLBACKS)}, not {fallback!r}")
        spec = spec_from(header["spec"])
        boxes = await self._node.births.claim(
            self._who(), await self._backend(header, spec), spec, header["count"],
            str(header.get("key", "")), shares_from(header.get("shares", ())), fresh=fallback == "create",
        )  # fmt: skip
        return {"boxes": [box.id for box in boxes], "about": [self._about(box) for box in boxes]}, b""

    async def _warm(self, header: Header, body: bytes) -> _Reply:
        """Keeps sandboxes ready: for the owner, or for the operator when the client speaks for nobody."""
        shares = shares_from(header.get("shares", ()))
        spec, count = spec_from(header["spec"]), int(header["count"])
        backend = await self._backend(header, spec)
        pool = await self._node.warm.want(self._owner, backend, spec, count, shares)
        return pool.about(), b""

    async def _keep_warm(self, header: Header, body: bytes) -> _Reply:
        self._node.warm.keep(header["pools"])
        return {}, b""

    async def _backend(self, header: Header, spec: SandboxSpec) -> str:
        return (await self._node.pick(spec.backend)).name if spec.backend else str(header["backend"])

    async def _hold_back(self, header: Header, body: bytes) -> _Reply:
        self._node.warm.hold_back(bool(header["on"]))
        return {}, b""

    async def _top(self, header: Header, body: bytes) -> _Reply:
        return {"rows": await rows(self._node)}, b""

    async def _attach(self, header: Header, body: bytes) -> _Reply:
        shares, replay = shares_from(header.get("shares", ())), bool(header["replay"])
        box, replayed = await self._node.births.attach(self._who(), header["box"], shares, replay=replay)
        return {**self._about(box), **asdict(replayed)}, b""

    def _who(self) -> str:
        if not self._owner:
            raise ProtocolError("a client says hello first")
        return self._owner

    async def _run(self, header: Header, body: bytes) -> _Reply:
        claim = Claim(**header.get("claim", {}))
        sink = functools.partial(self._ahead, header["id"]) if header["command"].get("stream") else None
        box = self._node.box(header["box"], self._owner)
        outcome = await box.run(header["command"], body, claim, sink)
        return {**outcome.fields(), **self._leased(box)}, outcome.body()

    async def _ahead(self, number: int, which: int, data: bytes) -> None:
        self._channel.write(encode({"event": which, "id": number}, data))
        await self._channel.drain()

    async def _pause(self, header: Header, body: bytes) -> _Reply:
        box = self._node.box(header["box"], self._owner)
        await box.pause()
        return self._leased(box), b""

    async def _resume(self, header: Header, body: bytes) -> _Reply:
        box = self._node.box(header["box"], self._owner)
        await box.resume()
        return self._leased(box), b""

    async def _extend(self, header: Header, body: bytes) -> _Reply:
        box = self._node.box(header["box"], self._owner)
        if "ttl_s" in header:
            box.extend(check_time(header["ttl_s"], "ttl_s", 1e-9, MAX_LIFE_S))
        if "life_s" in header:
            life_s = check_time(header["life_s"], "life_s", 0.0, MAX_LIFE_S)
            box.live(life_s, at_least=bool(header.get("at_least")))
        return self._leased(box), b""

    async def _describe(self, header: Header, body: bytes) -> _Reply:
        names = [header["box"]] if header.get("box") else self._node.boxes(self._who())
        return {}, describe([self._node.box(name, self._owner) for name in names])

    async def _snapshot(self, header: Header, body: bytes) -> _Reply:
        box = self._node.box(header["box"], self._owner)
        check_disk(self._node.limits, self._node.state_dir)
        taken = await self._node.snapshots.take(box)
        return {"snapshot": taken.id}, b""

    async def _snapshots(self, header: Header, body: bytes) -> _Reply:
        return {"snapshots": [snapshot.id for snapshot in self._node.snapshots.of(self._who())]}, b""

    async def _forget(self, header: Header, body: bytes) -> _Reply:
        self._node.snapshots.remove(str(header["snapshot"]), self._who())
        return {}, b""

    async def _fork(self, header: Header, body: bytes) -> _Reply:
        shares = shares_from(header.get("shares", ()))
        count = check_forks(header["count"])
        made = await self._node.births.fork(self._owner, header["box"], count, shares)
        return {"boxes": [box.id for box in made], "about": [self._about(box) for box in made]}, b""

    async def _close(self, header: Header, body: bytes) -> _Reply:
        await self._node.close_box(header["box"], self._owner)
        return {}, b""

    async def _boxes(self, header: Header, body: bytes) -> _Reply:
        held = {"keys": self._node.keys(self._owner), "backends": self._node.backends_of(self._owner)}
        return {"boxes": self._node.boxes(self._owner), **held}, b""

    async def _release(self, header: Header, body: bytes) -> _Reply:
        return {"sandboxes": await self._node.release(str(header["owner"]))}, b""

    async def _owners(self, header: Header, body: bytes) -> _Reply:
        return {"owners": self._node.owners()}, b""

    async def _denials(self, header: Header, body: bytes) -> _Reply:
        denials = self._node.box(header["box"], self._owner).denials()
        return {"denials": [asdict(denial) for denial in denials]}, b""

    async def _load(self, header: Header, body: bytes) -> _Reply:
        return self._node.load(), b""

    def _about(self, box: Box) -> Header:
        journal = box.recorder.journal if box.recorder else None
        known = {"generation": journal.generation, "recorded": journal.last} if journal else {}
        return {"box": box.id, "generation": 1, "recorded": 0, **known, **self._leased(box)}

    def _leased(self, box: Box) -> Header:
        """Returns how long the sandbox may be idle, and how long it outlives its owner's last client."""
        return {"ttl_s": box.ttl_s, "lease_s": self._lease.lease_s if self._lease else 0.0}


def spec_from(data: Mapping[str, Any]) -> SandboxSpec:
    """Returns the specification that a client sent as JSON values."""
    fields: dict[str, Any] = {**data, "limits": Limits(**data["limits"])}
    if "network" in data:
        fields["network"] = Network.of(data["network"])
    return check_spec(SandboxSpec(**fields))
