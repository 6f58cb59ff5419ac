"""The SDK: what a rollout uses to get sandboxes and to run commands in them.

    async with await Fleet.connect("local", state_dir=Path("~/.tempering"), owner="my-run") as fleet:
        async with await fleet.create(SandboxSpec()) as box:
            print((await box.exec("echo hello")).stdout)

`local` starts the node of this machine as a process of its own when none answers. The address of a front, as
in `https://fleet:7330`, gives the same calls on a fleet of nodes. Sandboxes belong to an owner and outlive a
killed client until the owner's lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from sandbox.calls import Call, Calls
from sandbox.channel import Header
from sandbox.connection import Connection, Link, greet
from sandbox.errors import LostError, PolicyError, RefusedError, SandboxError
from sandbox.making import make
from sandbox.node import SOCKET
from sandbox.past import Ask, Past, Unknown
from sandbox.pool import Pool
from sandbox.remote import RemoteBox
from sandbox.tokens import TOKEN, TOKEN_FILE, read_token
from sandbox.types import Capabilities, ExecResult, Limits, SandboxSpec
from sandbox.web import Caller, WebConnection

Fallback = Literal["create", "refuse"]
DEFAULT_LEASE_S = 60.0
_RETRY_S, _RETRY_AT_MOST_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What `Fleet.reclaim` removed: sandboxes by owner."""

    sandboxes: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def total(self) -> int:
        """The number of sandboxes removed."""
        return sum(self.sandboxes.values())


class Fleet:
    """A connection to a node, on behalf of one owner. Open it with `async with await Fleet.connect(...)`."""

    def __init__(self, connection: Link, owner: str, welcome: Header):
        self._connection, self.owner = connection, owner
        self.backend: str = welcome["backend"]
        self.node_pid: int = welcome["pid"]
        self._calls = Calls(self)
        self.capabilities = Capabilities(**welcome["capabilities"])
        self.lease_s: float = welcome.get("lease_s", 0.0)

    @classmethod
    async def connect(
        cls,
        url: str = "local",
        *,
        state_dir: Path | None = None,
        owner: str,
        backend: str = "auto",
        lease_s: float = DEFAULT_LEASE_S,
        token: str = "",
    ) -> Fleet:
        """Connects to the node of this machine, starting it when none answers, or to a fleet's front.

        Args:
            url: `local`, or the address of a front.
            state_dir: Where the local node has its socket, record and log.
            owner: To whom sandboxes belong, as a rule the run.
            backend: `docker`, `bubblewrap`, or `auto` for the first of them that this machine has; `gvisor`
                and `function` only by name.
            lease_s: How long sandboxes outlive the owner's last client; a longer one that an earlier client
                asked for stays (`Fleet.lease_s` says which holds).
            token: For a front; by default that of the environment (TEMPER_SANDBOX_TOKEN, or the file that
                TEMPER_SANDBOX_TOKEN_FILE names).

        Raises:
            BackendMissingError: The backend asked for (or any, for `auto`) is not to be had there.
            PolicyError: The address or the token is wrong, or the owner has no name.
            LostError: The front does not answer.
            InfrastructureError: The node does not start.
        """
        if not owner:
            raise PolicyError("sandboxes belong to an owner: give the run's name")
        hello = {"op": "hello", "owner": owner, "backend": backend, "lease_s": lease_s}
        if url != "local":
            token = token or read_token(os.environ, TOKEN, TOKEN_FILE)
            connection = WebConnection(Caller(url, token), owner, lease_s)
            try:
                return cls(connection, owner, (await connection.request(hello))[0])
            except BaseException:
                await connection.close()
                raise
        if state_dir is None:
            raise PolicyError("the local fleet has a state folder: give state_dir")
        state_dir = _absolute(state_dir)
        connection, welcome = await greet(state_dir, hello)
        return cls(connection, owner, welcome)

    @property
    def lost(self) -> bool:
        """Whether the node of this connection is gone; a front is asked anew with each request."""
        return isinstance(self._connection, Connection) and self._connection.lost

    @staticmethod
    async def reclaim(state_dir: Path, keep_owners: Set[str] = frozenset()) -> Reclaimed:
        """Ends the sandboxes of owners without a client that are not in `keep_owners`; says what there was.

        When no node lives there is nothing to find: sandboxes end with their node.
        """
        try:
            connection = await Connection.open(_absolute(state_dir) / SOCKET)
        except OSError:
            return Reclaimed()
        return await release_ownerless(connection, keep_owners)

    async def claim(
        self,
        spec: SandboxSpec | None = None,
        count: int = 1,
        *,
        fallback: Fallback = "create",
        key: str = "",
        wait_s: float = 60.0,
    ) -> list[RemoteBox]:
        """Takes `count` sandboxes of one node out of its warm pool, all at once or none of them.

        Args:
            spec: What they are: a pool is of exactly equal specifications.
            count: How many; a group stays within one node.
            fallback: What becomes of a claim for which no pool has all of them ready: they are started
                (`create`), all or none, or it is refused (`refuse`).
            key: Names the claim: a second one with the same key gets the same sandboxes.
            wait_s: How long to ask again while too many sandboxes are being started.

        Raises:
            RefusedError: No pool has all of them ready (`pool`), or no node has room.
            PolicyError: The backend or the node does not offer what `spec` asks for.
        """
        request = {"op": "claim", "backend": self.backend, "spec": asdict(spec or SandboxSpec())}
        request |= {"count": count, "fallback": fallback, "key": key}
        reply = await self._patiently(request, wait_s)
        return [RemoteBox(self._connection, about["box"], Past.known(about)) for about in reply["about"]]

    async def warm(self, spec: SandboxSpec | None = None, count: int = 1) -> str:
        """Has a node keep `count` sandboxes ready for claims and creates, while this owner is there.

        They are started in the background, beside those that the operator or others want of the same; 0 ends
        it. They count in the project's quota from now on. Returns the name of the pool.

        Raises:
            PolicyError: There will never be so many.
        """
        request = {"op": "warm", "backend": self.backend, "spec": asdict(spec or SandboxSpec())}
        return (await self._connection.request({**request, "count": count}))[0]["pool"]

    async def create(
        self,
        spec: SandboxSpec | None = None,
        *,
        key: str = "",
        snapshot: str = "",
        wait_s: float = 60.0,
    ) -> RemoteBox:
        """Starts a sandbox, or takes one from the warm pool of its specification.

        While too many are being started it asks again, for at most `wait_s` seconds.

        Args:
            spec: What to start.
            key: Names the creation: a second one with the same key gets the sandbox of the first. When that
                was lost with its node, it is made anew from its journal, in its next generation.
            snapshot: Starts with the files of a snapshot (`RemoteBox.snapshot`).
            wait_s: How long to ask again.

        Raises:
            RefusedError: The node has no room.
            PolicyError: The backend or the node does not offer what `spec` asks for.
            StartTimeoutError: The sandbox did not come up in time.
            LostError: The sandbox of this key was lost with its node, and had no journal.
        """
        request = {"op": "create", "backend": self.backend, "spec": asdict(spec or SandboxSpec())}
        request |= {"key": key, "snapshot": snapshot}
        about = await self._patiently(request, wait_s)
        return RemoteBox(self._connection, about["box"], Past.known(about))

    async def _patiently(self, request: Header, wait_s: float) -> Header:
        deadline, pause_s = time.monotonic() + wait_s, _RETRY_S
        while True:
            try:
                return await make(self._connection, request)
            except RefusedError as error:
                if error.reason != "start_rate" or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause_s * (1 + random.random()))
            pause_s = min(2 * pause_s, _RETRY_AT_MOST_S)  # many who ask often take the time of the starts

    async def attach(
        self, sandbox_id: str, *, unknown: Unknown = "fail", ask: Ask | None = None, replay: bool = False
    ) -> RemoteBox:
        """Returns a sandbox of an earlier client of this owner, for a caller that starts its sequence over.

        The caller gives the same commands in the same order. Those that finished return what they returned
        then, without running; after the last of them, commands run.

        Args:
            sandbox_id: Its id.
            unknown: What becomes of a command that was under way at the crash: `fail` raises
                UnknownOutcomeError, `rerun_if_idempotent` runs it again when it was marked so and fails
                otherwise, `ask` does what `ask` says.
            ask: Gets the number of the command and the error, and says `fail`, `rerun` or `accept` (it
                counts as done, with an exit code of None).
            replay: Whether a sandbox that is gone is made anew: a fresh generation in which all that
                finished runs again, counted in `RemoteBox.replayed`.

        Raises:
            LostError: There is no such sandbox, or only its journal and `replay` is off.
            JournalMismatchError: Replayed, a command ended in another way.
            JournalError: The journal is damaged or does not hold all commands.
            PolicyError: `unknown` and `ask` do not fit.
        """
        if (unknown == "ask") is not (ask is not None):
            raise PolicyError("unknown='ask' needs a function to ask, and only it does")
        request = {"op": "attach", "box": sandbox_id, "replay": replay}
        about = (await self._connection.request(request))[0]
        return RemoteBox(self._connection, sandbox_id, Past.of(about, unknown, ask))

    async def pool(self, spec: SandboxSpec | None = None, size: int = 1, *, key: str = "") -> Pool:
        """Starts `size` sandboxes that stateless calls share, without journals; all or none.

        With `key` it takes over those that an earlier client of this owner made under it, where they live.
        """
        if size < 1:
            raise PolicyError(f"a pool has at least one sandbox, not {size}")
        spec = replace(spec or SandboxSpec(), journal=False)
        keys = [f"pool/{key}/{number}" if key else "" for number in range(size)]
        made = await asyncio.gather(*(self._pooled(spec, one) for one in keys), return_exceptions=True)
        boxes = [box for box in made if isinstance(box, RemoteBox)]
        for failure in made:
            if isinstance(failure, BaseException):
                await asyncio.gather(*(box.close() for box in boxes))
                raise failure
        return Pool(self, spec, boxes)

    async def _pooled(self, spec: SandboxSpec, key: str) -> RemoteBox:
        try:
            return await self.create(spec, key=key)
        except LostError:
            if not key or self.lost:
                raise
            return await self.create(spec)  # the node was killed, and the key is that of a lost one

    async def call(
        self,
        command: str | Sequence[str] = "",
        *,
        source: str = "",
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
        timeout_s: float = 10.0,
        output_limit: int = 1 << 16,
    ) -> ExecResult:
        """Runs a command or Python `source` in an empty place, on a worker that is there already.

        The first call of a client starts its workers, by the backend `function` whatever the connection has.
        A call keeps nothing and finds nothing of another; see `sandbox.calls.Call` for what it brings.

        Raises:
            BackendMissingError: The node has no such backend.
            PolicyError: It brings neither or both of command and source, or too much.
        """
        call = Call(command, source, files or {}, stdin, timeout_s, output_limit)
        return await self._calls.run(call, limits or Limits())

    async def discard(self, sandbox_id: str) -> None:
        """Deletes a sandbox of this owner and its journal, whether it still lives or not."""
        await RemoteBox(self._connection, sandbox_id).close()

    async def boxes(self) -> list[RemoteBox]:
        """Returns the owner's live sandboxes, those of an earlier client included."""
        reply, _ = await self._connection.request({"op": "boxes"})
        return [RemoteBox(self._connection, name) for name in reply["boxes"]]

    async def snapshots(self) -> list[str]:
        """Returns the owner's snapshots, the oldest first; they end with the owner, or after a day."""
        return (await self._connection.request({"op": "snapshots"}))[0]["snapshots"]

    async def forget(self, snapshot: str) -> None:
        """Deletes a snapshot."""
        await self._connection.request({"op": "forget", "snapshot": snapshot})

    async def close(self, *, release: bool = True) -> None:
        """Disconnects; with `release` the owner's sandboxes end now instead of with the lease."""
        with contextlib.suppress(SandboxError):
            await self._calls.close()
            if release:
                await self._connection.request({"op": "release", "owner": self.owner})
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def release_ownerless(connection: Link, keep_owners: Set[str] = frozenset()) -> Reclaimed:
    """Ends the sandboxes of owners without a client that are not in `keep_owners`; ends the connection too.

    Owners of a front are `project:owner`.
    """
    ended: dict[str, int] = {}
    try:
        owners = (await connection.request({"op": "owners"}))[0]["owners"]
        for name in [n for n, held in owners.items() if n not in keep_owners and not held["clients"]]:
            ended[name] = (await connection.request({"op": "release", "owner": name}))[0]["sandboxes"]
    except LostError:
        return Reclaimed(ended)
    finally:
        await connection.close()
    return Reclaimed({name: count for name, count in ended.items() if count})


def _absolute(state_dir: Path) -> Path:
    return state_dir.expanduser().absolute()
