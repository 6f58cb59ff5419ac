"""One sandbox on its node: commands by way of the resident agent, results checked and put into records."""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass, field

from sandbox.backends.base import Started
from sandbox.channel import Header
from sandbox.errors import InfrastructureError, LostError, PolicyError, ProtocolError, RefusedError
from sandbox.recovery import Claim, Recorder, Replay, replay
from sandbox.resident import Resident, check_result
from sandbox.types import ExecResult, SandboxSpec

_PROCESSES_A_COMMAND = 8
_MAX_QUEUE = 1024
_NEXT = Claim()
OPERATIONS = frozenset({"exec", "python", "read", "write"})


@dataclass(slots=True)
class Box:
    """A live sandbox: who owns it, what it was asked to be, and its agent."""

    id: str
    owner: str
    spec: SandboxSpec
    started: Started
    recorder: Recorder | None = None
    key: str = ""
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

    async def run(self, command: Header, body: bytes, claim: Claim = _NEXT) -> ExecResult:
        """Runs a command (`op` is one of `OPERATIONS`), or answers it from the journal.

        Raises:
            RefusedError: Too many commands wait for this sandbox (`busy`).
            InfrastructureError: The command could not be started.
            LostError: The sandbox is gone.
            ProtocolError: It answered out of shape.
            JournalMismatchError: A caller who replays has another command than the journal.
            UnknownOutcomeError: The command was under way when an earlier caller died.
        """
        if command["op"] not in OPERATIONS:
            raise PolicyError(f"there is no command {command['op']!r}, only {', '.join(sorted(OPERATIONS))}")
        if self.recorder is None:
            if claim.seq:
                raise PolicyError(f"sandbox {self.id} has no journal to replay: create it with journal=True")
            return await self._queue(command, body)
        perform = functools.partial(self._queue, command, body)
        return await self.recorder.run(command, body, claim, perform, self.resident.settled)

    async def replay(self) -> Replay:
        """Runs what the journal has as finished, in this fresh sandbox; see `recovery.replay`."""
        assert self.recorder is not None
        return await replay(self.recorder.journal, self._queue)

    async def _queue(self, header: Header, body: bytes) -> ExecResult:
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

    async def close(self) -> None:
        """Ends the sandbox with everything in it; returns when it is gone."""
        await self.resident.close()
