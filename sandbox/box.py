"""One sandbox on its node: commands by way of the resident agent, results checked and put into records."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sandbox.backends.base import Started
from sandbox.background import Background
from sandbox.channel import Header
from sandbox.errors import (
    InfrastructureError,
    LostError,
    PolicyError,
    ProtocolError,
    RefusedError,
    SandboxError,
    SandboxOomError,
)
from sandbox.journal import Journal
from sandbox.outcome import FIELDS, Outcome
from sandbox.policy import Denial
from sandbox.recovery import Claim, Recorder, Replay, replay
from sandbox.resident import STATE, Resident, Sink, check_result
from sandbox.shapes import check_command
from sandbox.types import Capabilities, ExecResult, Latency, SandboxSpec

_PROCESSES_A_COMMAND = 8
_MAX_QUEUE, _MAX_PROCESSES = 1024, 32
_ASK_S = 10.0
_LATE_S: dict[Latency, float] = {"sensitive": 5.0, "best_effort": 120.0}
"""Beyond a command's time, after which an agent that says nothing counts as dead: one may wait for a core."""

_NEXT = Claim()
OPERATIONS = frozenset(
    {"exec", "python", "read", "write", "list", "stat", "pack", "unpack", "remove", "move"}
)
"""What a caller can have the agent do, besides what `Background` does."""

_PHASE = "phase"
"""What the node itself does, in the sequence of the others."""

CALLS = frozenset({"exec", "python"})
"""Of these, what a sandbox without state can do."""

_UNRECORDED = frozenset({"pack"})
"""Trees go out as they are at that time, and are too large for a journal."""

_USERS = range(1000, 60000)


@dataclass(slots=True)
class Box:
    """A live sandbox: who owns it, what it was asked to be, and its agent."""

    id: str
    owner: str
    spec: SandboxSpec
    backend: str
    started: Started
    capabilities: Capabilities
    recorder: Recorder | None = None
    key: str = ""
    snapshot: str = ""
    name: str = ""
    pool: str = ""
    born: float = field(default_factory=time.monotonic)
    ttl_s: float = field(init=False)
    resident: Resident = field(init=False)
    background: Background = field(init=False)
    used: float = field(default_factory=time.monotonic)
    born_s: float = field(default_factory=time.time)
    end: float = field(init=False)
    held_at: float = 0.0
    running: int = 0
    places: asyncio.Semaphore = field(init=False)
    pausing: asyncio.Lock = field(default_factory=asyncio.Lock)
    calm: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.ttl_s = self.spec.ttl_s
        self.live(self.spec.life_s)
        self.calm.set()
        # What does not fit beside the commands that run waits here, in order, not as a failed fork.
        at_once = self.spec.limits.pids // _PROCESSES_A_COMMAND if self.capabilities.stateful else 1
        self.places = asyncio.Semaphore(max(at_once, 1))
        started, late_s = self.started, _LATE_S[self.spec.latency]
        self.resident = Resident(started.channel, started.kill, self._explain, late_s)
        self.background = Background(self.resident, min(_MAX_PROCESSES, max(self.spec.limits.pids // 4, 1)))

    def _explain(self, fault: SandboxError) -> SandboxError:
        if isinstance(fault, LostError) and self.started.oom_kills():
            return SandboxOomError(f"{fault}; the kernel has ended processes of it for memory")
        return fault

    def expired(self) -> bool:
        """Whether it is of no use any more: dead, idle for longer than its time to live, or past its end."""
        if not self.held_at and time.monotonic() > self.end:
            return True
        idle = not self.running and time.monotonic() - self.used > self.ttl_s
        return idle or self.resident.fault is not None

    def extend(self, ttl_s: float) -> None:
        """Sets how long it may be idle from now on."""
        self.ttl_s, self.used = ttl_s, time.monotonic()

    def live(self, life_s: float, *, at_least: bool = False) -> None:
        """Sets how many seconds from now it ends, used or not; 0 sets no end. A pause does not count."""
        end = (self.held_at or time.monotonic()) + life_s if life_s else math.inf
        self.end = max(self.end, end) if at_least else end

    def left_s(self) -> float | None:
        """Returns the seconds until its end, if it has one."""
        return None if math.isinf(self.end) else self.end - (self.held_at or time.monotonic())

    async def ping(self, timeout_s: float) -> None:
        """Returns when the agent answers."""
        await self.resident.request({"op": "ping"}, timeout_s=timeout_s)

    async def run(
        self, command: Header, body: bytes, claim: Claim = _NEXT, sink: Sink | None = None
    ) -> Outcome:
        """Runs a command (`op` is one of `OPERATIONS` or of `Background`), or answers it from the journal.

        Args:
            command: What to do.
            body: The bytes that go with it.
            claim: What the caller says of its place in the sequence.
            sink: Takes the output of a command that streams, ahead of the outcome.

        Raises:
            RefusedError: Too many commands wait for this sandbox (`busy`), or it is `paused`.
            InfrastructureError: The command could not be started.
            LostError: The sandbox is gone.
            ProtocolError: It answered out of shape.
            PolicyError: There is no such command, or this sandbox does not offer it.
            JournalMismatchError: A caller who replays has another command than the journal.
            UnknownOutcomeError: The command was under way when an earlier caller died.
        """
        self._check(command)
        while not self.calm.is_set():  # another snapshot may begin before it is this command's turn
            await self.calm.wait()
        perform = functools.partial(self.perform, command, body, sink)
        if self.recorder is None or command["op"] in _UNRECORDED:
            if claim.seq and command["op"] not in _UNRECORDED:
                raise PolicyError(f"sandbox {self.id} has no journal to replay: create it with journal=True")
            return await perform()
        return await self.recorder.run(command, body, claim, perform, self.resident.settled)

    def _check(self, command: Header) -> None:
        known = OPERATIONS | Background.OPERATIONS | {_PHASE}
        if command["op"] not in known:
            raise PolicyError(f"there is no command {command['op']!r}, only {', '.join(sorted(known))}")
        check_command(command)
        if not self.capabilities.stateful and (command["op"] not in CALLS or command.get("state")):
            raise PolicyError(
                f"a {self.backend} sandbox keeps nothing between calls (stateful), so that it has no files, "
                "sessions or background: give exec, python or call all that they need"
            )
        if command.get("files") and self.capabilities.stateful:
            raise PolicyError("a call brings files only where it starts in an empty place: use write_file")
        if (user := command.get("user")) is not None:
            if not self.capabilities.separate_users:
                raise PolicyError(
                    "commands have no user of their own here (separate_users): run as root, or use docker"
                )
            if user not in _USERS:
                raise PolicyError(f"commands run as a user from {_USERS[0]} to {_USERS[-1]}, not {user}")
        if command["op"] == _PHASE:
            self.spec.network.check(command["phase"])
        if command.get("pty") and not self.capabilities.terminal:
            raise PolicyError("this backend has no terminals")

    async def replay(self, since: int = 0) -> Replay:
        """Runs what the journal has as finished, in this fresh sandbox; see `recovery.replay`."""
        assert self.recorder is not None
        self.background.skip(self.recorder.journal.count("start", since))
        if (phase := phase_after(self.recorder.journal, since)) and self.started.gate is not None:
            self.started.gate.switch(phase)
        return await replay(self.recorder.journal, self.perform, since, self.background.skip)

    async def perform(self, header: Header, body: bytes, sink: Sink | None = None) -> Outcome:
        """Runs a command without a word to the journal; waits for its turn."""
        if header["op"] == _PHASE:
            return self._switch(header["phase"])
        if self.resident.clocks.held:
            raise RefusedError(f"sandbox {self.id} is paused: resume it first", "paused")
        if self.running >= _MAX_QUEUE:
            raise RefusedError(f"{self.running} commands wait for this sandbox already", "busy")
        self.running += 1
        try:
            if header["op"] in Background.OPERATIONS:
                return await self.background.run(header, body)
            async with self.places:
                return await self._run(header, body, sink)
        finally:
            self.running -= 1
            self.used = time.monotonic()

    def _switch(self, phase: str) -> Outcome:
        self.spec.network.check(phase)
        assert self.started.gate is not None
        self.started.gate.switch(phase)
        self.used = time.monotonic()
        return Outcome(ExecResult(0, b"", b""))

    def denials(self) -> list[Denial]:
        """Returns what did not pass its network.

        Raises:
            PolicyError: It has none.
        """
        self.spec.network.check(self.spec.network.phase)
        assert self.started.gate is not None
        return self.started.gate.denials()

    async def _run(self, header: Header, body: bytes, sink: Sink | None) -> Outcome:
        kills = self.started.oom_kills()
        if sink is None and header.get("stream"):
            header = {**header, "stream": False}
        reply, output = await self.resident.request(
            header, body, timeout_s=float(header["timeout_s"]), sink=sink
        )
        if isinstance(problem := reply.get("error"), str):
            raise InfrastructureError(f"the sandbox could not start the command ({problem[:40]})")
        try:
            check_result(reply, output, int(header["limit"]), STATE if header.get("state") else 0)
        except ProtocolError:
            await self.resident.close()
            raise
        if reply["dirty"]:
            self.resident.fault = LostError("a command left files behind that could not be removed")
        unknown = reply["timed_out"] or reply["cancelled"]
        oom = reply["exit_code"] != 0 and self.started.oom_kills() > kills
        fields: dict[str, Any] = {name: reply.get(name) for name in FIELDS}
        fields |= {"oom": oom, "exit_code": None if unknown else reply["exit_code"]}
        fields |= {"stdout_bytes": reply["stdout_bytes"], "stderr_bytes": reply["stderr_bytes"]}
        return Outcome.of(fields, output)

    async def pause(self) -> None:
        """Stops all its processes; their deadlines stand still.

        Raises:
            PolicyError: The backend cannot.
            InfrastructureError: It did not happen; the sandbox goes on.
        """
        async with self.pausing:
            if self.started.pause is None:
                raise PolicyError("this backend cannot pause here (capability pause)")
            if not self.resident.clocks.held:
                await self.resident.request({"op": "hold"}, timeout_s=_ASK_S)
                self.resident.clocks.hold()
                self.held_at = time.monotonic()  # also for who resumes it when this caller has gone
                try:
                    await self.started.pause(True)
                except (InfrastructureError, OSError):
                    self.held_at = 0.0
                    await self._go_on()
                    raise
            self.used = time.monotonic()

    async def resume(self) -> None:
        """Lets a paused sandbox go on."""
        async with self.pausing:
            if self.resident.clocks.held and self.started.pause is not None:
                await self.started.pause(False)
                self.end, self.held_at = self.end + time.monotonic() - self.held_at, 0.0
                await self._go_on()
            self.used = time.monotonic()

    def check_snapshots(self) -> None:
        """Returns when the sandbox can have files of another, and another its files.

        Raises:
            PolicyError: The backend has no snapshots.
        """
        if not self.capabilities.disk_snapshot:
            raise PolicyError(f"a {self.backend} sandbox has no snapshots (disk_snapshot)")

    async def _go_on(self) -> None:
        self.resident.clocks.go_on()
        await self.resident.request({"op": "go_on"}, timeout_s=_ASK_S)

    @asynccontextmanager
    async def quiet(self) -> AsyncGenerator[int]:
        """Has commands wait while a snapshot is taken; gives the number of the last one.

        Raises:
            PolicyError: The backend has no snapshots.
            RefusedError: A command is running (`busy`).
        """
        self.check_snapshots()
        if self.resident.clocks.held:
            raise RefusedError(f"sandbox {self.id} is paused: resume it first", "paused")
        if self.running or not self.calm.is_set():
            raise RefusedError(
                f"{self.running} commands run in sandbox {self.id}: wait for their end", "busy"
            )
        self.calm.clear()
        try:
            yield self.recorder.journal.last if self.recorder else 0
        finally:
            self.calm.set()

    async def close(self) -> None:
        """Ends the sandbox with everything in it; returns when it is gone."""
        await self.resident.close()


def phase_after(journal: Journal, seq: int) -> str:
    """Returns the network phase that a sandbox was in after its command `seq`; empty: the one it began in."""
    switches = [n for n, entry in journal.entries.items() if entry.operation == _PHASE and n <= seq]
    done = [n for n in switches if journal.entries[n].result and not journal.failed(n)]
    return str(journal.command(done[-1])[0]["phase"]) if done else ""
