"""The environment that a `Definition` describes, with options filled in: what the framework works with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from envs.agents import Agent
from envs.base import ToolError
from envs.plugins import check_options
from envs.scoring import judge
from envs.types import Message, Missing, Score, Task, ToolCall, ToolSpec, Trajectory
from sandbox.base import Sandbox
from sandbox.types import SandboxSpec

if TYPE_CHECKING:
    from envs.definition import Definition


class FunctionEnvironment:
    """Fulfils `envs.base.Environment` with the functions of a definition.

    Raises:
        UnknownOptionError: The task generator takes no such option, or misses one.
    """

    def __init__(self, definition: Definition, options: Mapping[str, Any]) -> None:
        check_options(f"environment {definition.name!r}", definition.function, options, hidden=2)
        self.definition = definition
        self.options = dict(options)
        self.name: str = definition.name
        self.splits: tuple[str, ...] = definition.splits
        self.efforts: tuple[int, ...] = definition.efforts
        self.sandbox: SandboxSpec | None = definition.sandbox
        self.reward_name: str = definition.reward_name
        self.tools: tuple[ToolSpec, ...] = tuple(tool.spec for tool in definition.tools.values())
        self.agent: Agent | None = definition.agent_program
        self.max_turns: int = definition.max_turns or (64 if self.agent else 8 if self.tools else 1)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yields the tasks of a split. Raises ValueError for a split that does not exist."""
        self._check_split(split)
        return self.definition.function(split=split, seed=seed, **self.options)

    def demonstrations(self, split: str, seed: int) -> Iterator[tuple[Task, tuple[Message, ...]]]:
        """Yields example episodes; nothing when the environment has none."""
        self._check_split(split)
        make = self.definition.demonstration_function
        if make is None:
            return iter(())
        episodes = make(split=split, seed=seed, **self.options)
        return ((task, tuple(messages)) for task, messages in episodes)

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Runs the setup hook."""
        await _run_hook(self.definition.setup_function, task, sandbox)

    async def cleanup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Runs the cleanup hook."""
        await _run_hook(self.definition.cleanup_function, task, sandbox)

    async def call_tool(self, call: ToolCall, task: Task, sandbox: Sandbox | None) -> str:
        """Runs one tool call. Raises `ToolError` for a call at fault."""
        if call.name not in self.definition.tools:
            raise ToolError(f"unknown tool {call.name}")
        return await self.definition.tools[call.name].call(call, task, sandbox)

    async def score(self, task: Task, trajectory: Trajectory) -> Score | Missing:
        """Judges by the weighted parts. Raises ValueError when there are none."""
        if not self.definition.parts:
            raise ValueError(
                f"environment {self.name!r} has no reward of its own (library reward: {self.reward_name!r}); "
                f"decorate a function with `@{self.definition.function.__name__}.reward`"
            )
        return await judge(self.definition.parts, task, trajectory)

    def __reduce__(self) -> tuple[Any, ...]:
        function = self.definition.function
        path = inspect.getsourcefile(function) or ""
        return restore, (function.__module__, function.__qualname__, path, self.options)

    def _check_split(self, split: str) -> None:
        if split not in self.splits:
            near = get_close_matches(split, self.splits, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"environment {self.name!r} has no split {split!r}.{hint} "
                f"Its splits: {', '.join(self.splits)}."
            )


def restore(module: str, qualname: str, path: str, options: Mapping[str, Any]) -> FunctionEnvironment:
    """Rebuilds an environment in another process from where its definition stands."""
    from envs.killable import Reference

    return FunctionEnvironment(Reference(module, path, qualname).load(), options)  # pyright: ignore


async def _run_hook(hook: Callable[..., Any] | None, task: Task, sandbox: Sandbox | None) -> None:
    if hook is None:
        return
    result = hook(task, sandbox)
    if inspect.isawaitable(result):
        await result
