"""One sandbox on its node: commands by way of the resident agent, results checked and put into records."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from sandbox.backends.base import Started
from sandbox.channel import Header
from sandbox.errors import FileError, InfrastructureError, ProtocolError
from sandbox.resident import Resident, check_result
from sandbox.types import ExecResult, SandboxSpec

_FILE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Box:
    """A live sandbox: who owns it, what it was asked to be, and its agent."""

    id: str
    owner: str
    spec: SandboxSpec
    started: Started
    resident: Resident = field(init=False)
    created: float = field(default_factory=time.monotonic)
    oom_seen: int = 0
    places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        # A command takes three processes at least; what does not fit waits here, in order, not as a failed fork.
        self.places = asyncio.Semaphore(max(self.spec.limits.pids // 8, 1))
        self.resident = Resident(self.started.reader, self.started.writer, self.started.kill)

    async def ping(self, timeout_s: float) -> None:
        """Returns when the agent answers."""
        await self.resident.request({"op": "ping"}, timeout_s=timeout_s)

    async def run(self, header: Header, body: bytes) -> ExecResult:
        """Runs a command (`op` is `exec` or `python`) and returns what it did."""
        limit = int(header["limit"])
        async with self.places:
            reply, output = await self.resident.request(header, body, timeout_s=float(header["timeout_s"]))
        if isinstance(problem := reply.get("error"), str):
            raise InfrastructureError(
                f"the sandbox could not start the command: {problem} {reply.get('message')}"
            )
        try:
            check_result(reply, output, limit)
        except ProtocolError:
            await self.resident.close()
            raise
        kills = await self.started.oom_kills()
        oom, self.oom_seen = kills > self.oom_seen, max(kills, self.oom_seen)
        return ExecResult(
            exit_code=None if reply["timed_out"] or reply["cancelled"] else reply["exit_code"],
            stdout=output[: reply["stdout_bytes"]],
            stderr=output[reply["stdout_bytes"] :],
            truncated=reply["truncated"],
            timed_out=reply["timed_out"],
            oom=oom,
            duration_s=reply["duration_s"],
        )

    async def read_file(self, path: str, limit: int) -> bytes:
        """Reads a regular file of at most `limit` bytes.

        Raises:
            FileError: There is none, it is too large, or it is not a regular file.
        """
        return (await self._file({"op": "read", "path": path, "limit": 2 * limit + 2}, b"", path)).stdout[
            :limit
        ]

    async def write_file(self, path: str, data: bytes, mode: int) -> None:
        """Writes a file, making its folders.

        Raises:
            FileError: It cannot be written.
        """
        await self._file({"op": "write", "path": path, "mode": mode, "limit": 1024}, data, path)

    async def _file(self, header: Header, body: bytes, path: str) -> ExecResult:
        result = await self.run({**header, "timeout_s": _FILE_TIMEOUT_S}, body)
        if result.exit_code != 0 or result.truncated:
            why = result.stderr.decode(errors="replace").strip() or f"exit code {result.exit_code}"
            raise FileError(f"{header['op']} of {path!r} in the sandbox failed: {why}")
        return result

    async def close(self) -> None:
        """Ends the sandbox with everything in it."""
        await self.resident.close()
