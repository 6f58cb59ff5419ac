"""One sandbox on its node: commands by way of the resident agent, results checked and put into records."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from sandbox.backends.base import Started
from sandbox.channel import Header
from sandbox.errors import FileError, InfrastructureError, LostError, ProtocolError, RefusedError
from sandbox.resident import Resident, check_result
from sandbox.types import ExecResult, SandboxSpec

_FILE_TIMEOUT_S = 60.0
_PROCESSES_A_COMMAND = 8
_MAX_QUEUE = 1024


@dataclass(slots=True)
class Box:
    """A live sandbox: who owns it, what it was asked to be, and its agent."""

    id: str
    owner: str
    spec: SandboxSpec
    started: Started
    resident: Resident = field(init=False)
    used: float = field(default_factory=time.monotonic)
    running: int = 0
    places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        # What does not fit beside the commands that run waits here, in order, not as a failed fork.
        self.places = asyncio.Semaphore(max(self.spec.limits.pids // _PROCESSES_A_COMMAND, 1))
        self.resident = Resident(self.started.reader, self.started.writer, self.started.kill)

    def expired(self) -> bool:
        """Whether it is of no use any more: dead, or idle for longer than its time to live."""
        idle = not self.running and time.monotonic() - self.used > self.spec.ttl_s
        return idle or self.resident.fault is not None

    async def ping(self, timeout_s: float) -> None:
        """Returns when the agent answers."""
        await self.resident.request({"op": "ping"}, timeout_s=timeout_s)

    async def run(self, header: Header, body: bytes) -> ExecResult:
        """Runs a command (`op` is `exec`, `python`, `read` or `write`) and returns what it did.

        Raises:
            RefusedError: Too many commands wait for this sandbox (`busy`).
            InfrastructureError: The command could not be started.
            LostError: The sandbox is gone.
            ProtocolError: It answered out of shape.
        """
        if self.running >= _MAX_QUEUE:
            raise RefusedError(f"{self.running} commands wait for this sandbox already", "busy")
        self.running += 1
        try:
            async with self.places:
                return await self._run(header, body)
        finally:
            self.running -= 1
            self.used = time.monotonic()

    async def _run(self, header: Header, body: bytes) -> ExecResult:
        kills = self.started.oom_kills()
        reply, output = await self.resident.request(header, body, timeout_s=float(header["timeout_s"]))
        if isinstance(problem := reply.get("error"), str):
            raise InfrastructureError(f"the sandbox could not start the command ({problem[:40]})")
        try:
            check_result(reply, output, int(header["limit"]))
        except ProtocolError:
            await self.resident.close()
            raise
        if reply["dirty"]:
            self.resident.fault = LostError("a command left files behind that could not be removed")
        unknown = reply["timed_out"] or reply["cancelled"]
        return ExecResult(
            exit_code=None if unknown else reply["exit_code"],
            stdout=output[: reply["stdout_bytes"]],
            stderr=output[reply["stdout_bytes"] :],
            truncated=reply["truncated"],
            timed_out=reply["timed_out"],
            oom=reply["exit_code"] != 0 and self.started.oom_kills() > kills,
            duration_s=reply["duration_s"],
        )

    async def read_file(self, path: str, limit: int) -> bytes:
        """Reads a regular file of at most `limit` bytes.

        Raises:
            FileError: There is none, it is too large, or it is not a regular file.
        """
        header = {"op": "read", "path": path, "max_bytes": limit, "limit": 2 * max(limit, 1024)}
        return (await self._file(header, b"", path)).stdout

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
        """Ends the sandbox with everything in it; returns when it is gone."""
        await self.resident.close()
