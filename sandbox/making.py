"""Requests that make sandboxes, for callers that may be cancelled: what nobody waits for is given back.

A request that is cancelled when its answer is already on its way has made a sandbox that its caller never
hears of, and that would live as long as its owner. So the answer is waited for in the background, and what it
names is deleted. What was asked for under a key stays: whoever asks again under the key gets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from sandbox.channel import Header
from sandbox.connection import Link
from sandbox.errors import LostError, SandboxError

_returns: set[asyncio.Task[None]] = set()


async def make(connection: Link, request: Header) -> Header:
    """Sends a request that makes sandboxes and returns its reply.

    Raises:
        SandboxError: The node says so, or is gone.
    """
    asking = asyncio.create_task(connection.request(request))
    try:
        return (await asyncio.shield(asking))[0]
    except asyncio.CancelledError:
        if request.get("key"):
            asking.cancel()
        else:
            returning = asyncio.create_task(_give_back(connection, asking))
            _returns.add(returning)
            returning.add_done_callback(_returns.discard)
        raise


async def _give_back(connection: Link, asking: asyncio.Task[tuple[Header, bytes]]) -> None:
    with suppress(SandboxError):
        reply, _ = await asking
        for name in {*_names(reply)}:
            with suppress(LostError):
                await connection.request({"op": "close", "box": name})


def _names(reply: Header) -> Iterator[str]:
    yield from (reply["box"],) if "box" in reply else ()
    yield from reply.get("boxes", ())
    yield from (about["box"] for about in reply.get("about", ()))
