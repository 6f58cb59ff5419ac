"""The way from an E2B client's request to the front in the same process, on behalf of its project."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox.channel import Header
from sandbox.client import Fleet
from sandbox.remote import RemoteBox
from sandbox.tokens import Principal
from sandbox.wire import Sink

OWNER = "e2b"
"""Of all sandboxes that a project's E2B clients make: each of its keys sees them all."""

LEASE_S = 600.0
"""How long they outlive the last front."""

Perform = Callable[[Header, bytes, Sink], Awaitable[tuple[Header, bytes]]]
Watched = Callable[[Principal], Perform]


class FrontLink:
    """Requests of one project; has the shape of a connection, so that the SDK's own classes work on it."""

    def __init__(self, perform: Perform):
        self._perform = perform

    async def request(
        self, header: Header, body: bytes = b"", sink: Sink | None = None
    ) -> tuple[Header, bytes]:
        """Has the front perform a request; see `Connection.request`."""
        client = {"owner": OWNER, "lease_s": LEASE_S}
        return await self._perform({**header, "client": client}, body, sink or _drop)

    async def close(self) -> None:
        """Does nothing: there is no connection."""

    async def fleet(self, backend: str) -> Fleet:
        """Returns the SDK's view of the fleet, for a backend that it has.

        Raises:
            BackendMissingError: It has not.
        """
        welcome, _ = await self.request({"op": "hello", "backend": backend})
        return Fleet(self, OWNER, welcome)

    def box(self, name: str) -> RemoteBox:
        """Returns a sandbox, there or not."""
        return RemoteBox(self, name)

    async def describe(self, name: str = "") -> list[dict[str, Any]]:
        """Returns what the nodes say of the project's sandboxes, or of one.

        Raises:
            LostError: There is no such sandbox.
        """
        _, body = await self.request({"op": "describe", "box": name})
        return json.loads(body)


def _drop(which: int, data: bytes) -> None:
    """Takes output that nobody asked for."""
