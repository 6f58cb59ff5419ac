"""The caller's end of the fleet's HTTP interface; it has the shape of a connection to a local node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from sandbox.channel import Header, encode, read_frame
from sandbox.errors import InfrastructureError, LostError, PolicyError, SandboxError, from_wire
from sandbox.versions import API, request_for
from sandbox.wire import BEAT_S, TYPE, VERSION, Sink

PRESENT_S = 10.0
"""How often a client says that it is there."""

_SILENT_S = 6 * BEAT_S
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENT_S)
_LOG = logging.getLogger("sandbox.web")


class Caller:
    """Sends requests to a server: a front or a node agent."""

    def __init__(self, url: str, token: str, session: aiohttp.ClientSession | None = None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PolicyError(f"a fleet is 'local' or at an http(s) address, not {url!r}")
        if not token:
            raise PolicyError(f"{url} wants a token: set TEMPER_SANDBOX_TOKEN or TEMPER_SANDBOX_TOKEN_FILE")
        self.url, self._version = url.rstrip("/"), API
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": TYPE}
        self._session = session or aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._owned = session is None

    async def request(
        self, header: Header, body: bytes = b"", sink: Sink | None = None
    ) -> tuple[Header, bytes]:
        """Sends a request and returns its reply; a cancelled caller cancels it there.

        Args:
            header: The request.
            body: Bytes that go with it.
            sink: Takes output that comes ahead of the reply.

        Raises:
            SandboxError: The server says so, or is not to be reached.
        """
        while True:
            data = encode(request_for(self._version, header), body)
            headers = {**self._headers, VERSION: str(self._version)}
            try:
                call = self._session.post(
                    f"{self.url}/call", data=data, headers=headers, timeout=_TIMEOUT, allow_redirects=False
                )
                async with call as response:
                    if self._steps_down(response):
                        continue
                    return await self._read(response, sink)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise LostError(f"{self.url} does not answer: {error or type(error).__name__}") from error

    def _steps_down(self, response: aiohttp.ClientResponse) -> bool:
        """Whether the server is one version behind, and the request is to be sent in that."""
        theirs = response.headers.get(VERSION, "")
        if response.status < 400 or theirs != str(API - 1) or self._version != API:
            return False
        self._version = API - 1
        return True

    async def _read(self, response: aiohttp.ClientResponse, sink: Sink | None) -> tuple[Header, bytes]:
        if response.content_type != TYPE:
            text = (await response.content.read(200)).decode(errors="replace").strip()
            raise InfrastructureError(f"{self.url} answered {response.status} and no frame: {text}")
        while True:
            header, body = await read_frame(response.content)
            if "error" in header:
                raise from_wire(header["error"])
            if "event" not in header:
                return header, body
            if header["event"] >= 0 and sink is not None:
                sink(header["event"], body)

    async def get(self, path: str) -> str:
        """Returns what the server has at a path, as text.

        Raises:
            SandboxError: It cannot be had.
        """
        headers = {**self._headers, VERSION: str(self._version)}
        try:
            call = self._session.get(
                self.url + path, headers=headers, timeout=_TIMEOUT, allow_redirects=False
            )
            async with call as response:
                if response.content_type == TYPE:
                    await self._read(response, None)
                if response.status != 200:
                    raise InfrastructureError(f"{self.url}{path} answered {response.status}")
                return await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LostError(f"{self.url} does not answer: {error or type(error).__name__}") from error

    async def close(self) -> None:
        """Lets go of the server."""
        if self._owned:
            await self._session.close()


class WebConnection:
    """A client of a front, on behalf of one owner. It says every few seconds that it is there."""

    def __init__(self, caller: Caller, owner: str, lease_s: float):
        self._caller, self._client = caller, {"owner": owner, "lease_s": lease_s}
        self._nodes: set[str] = set()
        self._presence = asyncio.create_task(self._stay())

    async def request(
        self, header: Header, body: bytes = b"", sink: Sink | None = None
    ) -> tuple[Header, bytes]:
        """Sends a request and returns its reply; see `Caller.request`."""
        self._note(header)
        reply, data = await self._caller.request({**header, "client": self._client}, body, sink)
        self._note(reply)
        return reply, data

    def _note(self, header: Header) -> None:
        ids: Iterable[Any] = (header.get("box"), *header.get("boxes", ()))
        self._nodes.update(node_of(name) for name in ids if name)

    async def _stay(self) -> None:
        while True:
            await asyncio.sleep(PRESENT_S)
            if self._nodes:
                try:
                    await self.request({"op": "present", "nodes": sorted(self._nodes)})
                except SandboxError as error:
                    _LOG.warning("the fleet could not be told that this client lives: %s", error)

    async def close(self) -> None:
        """Ends the connection; the owner's lease runs from about now."""
        self._presence.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._presence
        await self._caller.close()


def node_of(name: str) -> str:
    """Returns the node that an id names.

    Raises:
        LostError: It names none.
    """
    node, dot, rest = name.partition(".")
    if not (node and dot and rest):
        raise LostError(f"{json.dumps(name)} is not the id of a sandbox of a fleet: it names no node")
    return node
