"""Runs a sample's tool calls where its sandbox is, and brings a sandbox back that was lost under them.

A stateless call that lost its box is simply made again. A sample's own box is attached to, or made anew, and
then its whole sequence is given again: `setup` and all calls so far. What the box's journal holds is answered
from there; the rest runs. That is also how a sample goes on that another process began.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from envs.base import Environment, ToolError
from envs.types import Boundary, ErrorInfo, Task, ToolCall
from rl.rollout.faults import Fault
from rl.rollout.sandboxes import OwnSandbox, Sandboxes
from rl.rollout.state import SandboxPlace
from sandbox.base import Sandbox
from sandbox.errors import LostError, SandboxError, SandboxOomError, UnknownOutcomeError

_TRIES = 4

OnPlace = Callable[[SandboxPlace], Awaitable[None]]


class Tools:
    """The tool calls of one sample. `own` is its sandbox where it has its own; `on_place` keeps its place."""

    def __init__(
        self, env: Environment, task: Task, sandboxes: Sandboxes | None, on_place: OnPlace | None = None
    ) -> None:
        self._env, self._task, self._sandboxes, self._on_place = env, task, sandboxes, on_place
        self._given: list[tuple[ToolCall, str]] = []
        self._ready = False
        self.own: OwnSandbox | None = None

    @property
    def box(self) -> Sandbox | None:
        """The sample's own sandbox, once it was opened."""
        return self.own.box if self.own is not None else None

    async def prepare(self, *, anew: bool = False) -> None:
        """Opens the sample's own sandbox and sets it up; `anew` for a program that was under way in it."""

        async def nothing(box: Sandbox) -> str:
            return ""

        await self._in_own(nothing)
        if anew:
            await self._bring(UnknownOutcomeError("an agent program was under way in the sandbox"))

    async def call(self, call: ToolCall) -> str:
        """Runs one call and returns the observation.

        Raises:
            Exception: What the environment raised, or the sandbox, when it could not be brought back.
        """
        if self.own is None:
            return await self._anywhere(call)
        text = await self._in_own(lambda box: self._text(call, box))
        self._given.append((call, text))
        return text

    def known(self, call: ToolCall, result: str) -> None:
        """Notes a call of an earlier process whose result is in the token log."""
        self._given.append((call, result))

    def place(self) -> SandboxPlace | None:
        """Where the sample's own sandbox stands."""
        return self.own.place if self.own is not None and self.own.box is not None else None

    async def _anywhere(self, call: ToolCall) -> str:
        for attempt in range(_TRIES):
            try:
                if self._sandboxes is None:
                    return await self._text(call, None)
                async with self._sandboxes.shared() as box:
                    return await self._text(call, box)
            except LostError as error:
                if isinstance(error, SandboxOomError) or attempt == _TRIES - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _in_own(self, step: Callable[[Sandbox], Awaitable[str]]) -> str:
        error: SandboxError | None = None
        for attempt in range(_TRIES):
            try:
                if error is not None or not self._ready:
                    await self._bring(error)
                assert self.own is not None and self.own.box is not None
                return await step(self.own.box)
            except (LostError, UnknownOutcomeError) as lost:
                if isinstance(lost, SandboxOomError) or attempt == _TRIES - 1:
                    raise
                error = lost
        raise AssertionError("the last attempt returns or raises")

    async def _bring(self, error: SandboxError | None) -> None:
        assert self.own is not None
        self._ready = False
        box = await self.own.open(error)
        if self._on_place is not None:
            await self._on_place(self.own.place)
        await self._env.setup(self._task, box)
        for call, before in self._given:
            now = await self._text(call, box)
            if self.own.rebuilt and now != before:
                message = (
                    f"sandbox and journal are gone, and tool call {call.number} gives another result now"
                )
                raise Fault(ErrorInfo(Boundary.SANDBOX, "SandboxLost", message))
        self._ready = True

    async def _text(self, call: ToolCall, box: Sandbox | None) -> str:
        try:
            return await self._env.call_tool(call, self._task, box)
        except ToolError as error:
            return str(error)
