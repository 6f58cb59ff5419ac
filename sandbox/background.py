"""Processes that go on after the request that started them, by their number in the sandbox's sequence."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

from sandbox.channel import Header
from sandbox.errors import InfrastructureError, PolicyError, ProtocolError, RefusedError
from sandbox.outcome import Outcome
from sandbox.resident import Resident
from sandbox.types import ExecResult

_ASK_S, _LOOK_S = 10.0, 0.01
_MAX_WAIT_S = 3600.0
_DONE = ExecResult(0, b"", b"")
_POLLED: dict[str, tuple[type, ...]] = {
    "offset": (int,), "running": (bool,), "exit_code": (int, type(None)), "signal": (int, type(None)),
    "failure": (int,),
}  # fmt: skip
_MAX_TURNS = 4096
_SHOWN = ("argv", "env", "cwd", "user", "pty")


class Background:
    """The background processes of a sandbox, counted from 1: a replayed start has its number again."""

    OPERATIONS = frozenset({"start", "poll", "signal", "input", "resize", "processes", "halt"})

    def __init__(self, resident: Resident, most: int):
        self._resident, self._most = resident, most
        self._agents: list[int] = []
        self._commands: dict[int, Header] = {}

    def skip(self, count: int) -> None:
        """Leaves out the numbers of processes that ran in an earlier generation and are gone."""
        self._agents += [0] * count

    async def run(self, command: Header, body: bytes) -> Outcome:
        """Does one operation; what it has to say is the outcome's `extra`, as JSON.

        Raises:
            LostError: The sandbox is gone.
            RefusedError: There are too many processes, or one does not read its input.
            PolicyError: There is no such process (any more), or the wait is too long.
        """
        if command["op"] == "start":
            self._agents.append(0)
            number = len(self._agents)
            reply, _ = await self._ask({**command, "most": self._most}, body, _ASK_S)
            self._agents[number - 1] = reply["id"]
            if len(self._commands) >= 2 * self._most:
                await self._look()
                self._commands = {at: about for at, about in self._commands.items() if about["running"]}
            self._commands[number] = {"running": True} | {
                name: command[name] for name in _SHOWN if command.get(name)
            }
            return Outcome(_DONE, json.dumps({"process": number}).encode())
        if command["op"] == "halt":
            return await self._halt(command)
        if command["op"] == "processes":
            await self._look()
            found = [{**about, "process": number} for number, about in self._commands.items()]
            return Outcome(_DONE, json.dumps(found).encode())
        number = command["process"]
        if not 0 < number <= len(self._agents) or not self._agents[number - 1]:
            raise PolicyError(f"there is no process {number} in the sandbox (any more)")
        wait_s = float(command.get("wait_s", 0))
        if not 0 <= wait_s <= _MAX_WAIT_S:
            raise PolicyError(f"a process is waited for at most {_MAX_WAIT_S} s at a time, not {wait_s}")
        asked: Header = {**command, "process": self._agents[number - 1]}
        reply, data = await self._ask(asked, body, wait_s + _ASK_S)
        if command["op"] != "poll":
            return Outcome(_DONE)
        said = await self._polled(reply, data, command["limit"])
        return Outcome(ExecResult(0, data, b""), json.dumps(said).encode())

    async def _halt(self, command: Header) -> Outcome:
        """Ends all processes of commands; returns when none is left."""
        deadline = time.monotonic() + _ASK_S
        while (left := (await self._ask(command, b"", _ASK_S))[0].get("left")) != 0:
            if type(left) is not int or time.monotonic() > deadline:
                await self._resident.close()
                raise ProtocolError(f"the sandbox could not end its processes ({left!r:.20} left)")
            await asyncio.sleep(_LOOK_S)
        return Outcome(_DONE)

    async def _look(self) -> None:
        """Looks which processes have ended, and forgets those that the agent has forgotten."""
        ask: Header = {"op": "poll", "limit": 0, "offset": 1 << 62, "wait_s": 0}
        for number in list(self._commands):
            try:
                reply, data = await self._ask({**ask, "process": self._agents[number - 1]}, b"", _ASK_S)
            except PolicyError:  # the agent has forgotten it
                del self._commands[number]
            else:
                self._commands[number]["running"] = (await self._polled(reply, data, 0))["running"]

    async def _ask(self, command: Header, body: bytes, timeout_s: float) -> tuple[Header, bytes]:
        reply, data = await self._resident.request(command, body, timeout_s=timeout_s)
        problem = reply.get("error")
        if problem == "ESRCH":
            raise PolicyError("there is no such process in the sandbox (any more)")
        if problem == "ENOBUFS":
            raise RefusedError("the process does not read its input; try again later", "busy")
        if problem in ("EMFILE", "EAGAIN"):
            raise RefusedError("the sandbox has no room for another process", "processes")
        if problem is not None:
            raise InfrastructureError(f"the sandbox could not do it ({str(problem)[:40]})")
        return reply, data

    async def _polled(self, reply: Header, data: bytes, limit: int) -> Header:
        said: dict[str, Any] = {name: reply.get(name, "missing") for name in _POLLED}
        wrong = [
            name for name, kinds in _POLLED.items()
            if not isinstance(said[name], kinds) or (isinstance(said[name], bool) and bool not in kinds)
        ]  # fmt: skip
        turns = reply.get("turns")
        if turns is not None:
            said["turns"] = turns
        if wrong or len(data) > limit or not _are_turns(turns):
            await self._resident.close()
            raise ProtocolError(f"an answer about a process out of shape ({', '.join(wrong) or 'too long'})")
        return said


def _are_turns(turns: Any) -> bool:
    """Whether this says, or leaves out, where in an output which stream begins: pairs of numbers."""
    if not isinstance(turns, list):
        return turns is None
    pairs = cast("list[Any]", turns)
    return len(pairs) <= _MAX_TURNS and all(
        isinstance(pair, list) and [type(part) for part in cast("list[Any]", pair)] == [int, int]
        for pair in pairs
    )
