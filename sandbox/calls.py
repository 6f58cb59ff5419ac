"""Calls without a past, on workers that are there already: how code is judged, a thousand times a minute.

A call is all that it needs: files, a command or a Python program, input. It starts in an empty place, and
nothing of it is left when its result is there, so that one worker serves whoever is next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sandbox.channel import MAX_BODY, Header
from sandbox.errors import LostError, PolicyError, SandboxOomError
from sandbox.types import ExecResult, Limits, SandboxSpec

if TYPE_CHECKING:
    from sandbox.client import Fleet
    from sandbox.pool import Pool
    from sandbox.remote import RemoteBox

BACKEND, WORKERS = "function", 4
_PROGRAM, _DATA = 0o755, 0o644


@dataclass(frozen=True, slots=True)
class Call:
    """What to run: either `command` (a shell line or an argv) or Python `source`.

    `files` are written first, by their paths in /workspace; those that begin with `#!` can be executed.
    """

    command: str | Sequence[str] = ""
    source: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    stdin: bytes = b""
    timeout_s: float = 10.0
    output_limit: int = 1 << 16

    def request(self) -> tuple[Header, bytes]:
        """Returns it as a command of the resident agent, with its bytes.

        Raises:
            PolicyError: It is not one thing to run, or too large.
        """
        if bool(self.command) == bool(self.source):
            raise PolicyError("a call has either a command or Python source")
        code = self.source.encode(errors="surrogatepass")
        argv = ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else list(self.command)
        header: Header = {"op": "exec", "argv": argv, "env": {}, "cwd": "/workspace"}
        if self.source:
            header = {"op": "python", "source_bytes": len(code), "cwd": "/workspace"}
        if self.files:
            header["files"] = [
                [path, len(data), _PROGRAM if data.startswith(b"#!") else _DATA]
                for path, data in self.files.items()
            ]
        body = b"".join((*self.files.values(), code, self.stdin))
        if len(body) > MAX_BODY:
            raise PolicyError(f"a call brings at most {MAX_BODY} bytes, not {len(body)}")
        return header, body


async def run(box: RemoteBox, call: Call) -> ExecResult:
    """Runs a call in a sandbox of the function backend.

    Raises:
        PolicyError: The sandbox keeps a state, and the call brings files.
    """
    header, body = call.request()
    return (await box.run(header, body, call.timeout_s, call.output_limit, True)).result


class Calls:
    """The workers of one client, a pool for each limits."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self._pools: dict[Limits, asyncio.Task[Pool]] = {}

    async def run(self, call: Call, limits: Limits) -> ExecResult:
        """Runs a call on the worker with the fewest; one that was gone already is replaced first.

        Raises:
            SandboxOomError: The worker itself fell to its memory limit.
            LostError: The worker was lost twice.
        """
        call.request()  # what makes no sense is said before anything starts
        pool = await self._pool(limits)
        try:
            async with pool.borrow() as box:
                return await run(box, call)
        except SandboxOomError:
            raise
        except LostError:  # it does nothing that lasts, so it may run again
            async with pool.borrow() as box:
                return await run(box, call)

    async def _pool(self, limits: Limits) -> Pool:
        making = self._pools.get(limits)
        if making is None or (making.done() and (making.cancelled() or making.exception())):
            spec = SandboxSpec(backend=BACKEND, limits=limits)
            making = self._pools[limits] = asyncio.create_task(self._fleet.pool(spec, WORKERS))
        return await asyncio.shield(making)

    async def close(self) -> None:
        """Ends the workers."""
        pools = await asyncio.gather(*self._pools.values(), return_exceptions=True)
        self._pools.clear()
        for pool in pools:
            if not isinstance(pool, BaseException):
                await pool.close()
