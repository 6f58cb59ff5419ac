"""The short way to write an environment: a generator of tasks under `@env`, and decorated functions.

    @env("demo/add", splits=("train", "eval"))
    def add(split, seed, n=1000): ...           # yields tasks; further parameters are options

    @add.reward                                 # a number; an exception is "no verdict", never 0
    def exact(task, trajectory): ...

`@add.tool(stateless=True)`, `@add.demonstrations`, `@add.setup` and `@add.cleanup` are there when needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

from envs.agents import Agent, as_agent, inside, reaching_model
from envs.function import FunctionEnvironment
from envs.killable import TIMEOUT_S
from envs.scoring import Part
from envs.tools import FunctionTool
from envs.types import Message, Task
from sandbox.types import SandboxSpec

TaskFunction = Callable[..., Iterator[Task]]
DemonstrationFunction = Callable[..., Iterator[tuple[Task, Sequence[Message]]]]
F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P")


class Definition:
    """What an author writes. Calling it with options gives the environment: `add(n=10)`.

    The decorator methods return the function they were given, so that it can still be called and tested.
    """

    def __init__(
        self,
        name: str,
        function: TaskFunction,
        *,
        splits: tuple[str, ...],
        max_turns: int | None,
        reward: str,
        efforts: tuple[int, ...],
        sandbox: SandboxSpec | None,
    ) -> None:
        turns_ok = max_turns is None or max_turns >= 1
        if not splits or not turns_ok or not efforts or not all(1 <= effort <= 100 for effort in efforts):
            raise ValueError(
                f"environment {name!r} needs at least one split, max_turns of 1 or more and efforts in "
                f"1..100, not splits={splits}, max_turns={max_turns}, efforts={efforts}"
            )
        self.name = name
        self.function = function
        self.splits = splits
        self.max_turns = max_turns
        self.reward_name = reward
        self.efforts = efforts
        self.sandbox = sandbox
        self.tools: dict[str, FunctionTool] = {}
        self.parts: list[Part] = []
        self.demonstration_function: DemonstrationFunction | None = None
        self.setup_function: Callable[..., Any] | None = None
        self.cleanup_function: Callable[..., Any] | None = None
        self.agent_program: Agent | None = None

    def __call__(self, **options: Any) -> FunctionEnvironment:
        """Returns the environment. Raises `UnknownOptionError` for an option the generator does not take."""
        return FunctionEnvironment(self, options)

    @overload
    def tool(self, function: F) -> F: ...
    @overload
    def tool(self, *, stateless: bool = False) -> Callable[[F], F]: ...
    def tool(self, function: Any = None, *, stateless: bool = False) -> Any:
        """Makes a typed function a tool; its docstring describes it to the policy.

        The parameters `task`, `sandbox` and `number` (of the call in its trajectory, from 0) are filled in.
        A `stateless` tool may run in a sandbox that serves others too.
        """

        def add(target: F) -> F:
            tool = FunctionTool.of(target, stateless=stateless)
            if tool.spec.name in self.tools:
                raise ValueError(
                    f"environment {self.name!r} has two tools named {tool.spec.name!r}; rename one"
                )
            self.tools[tool.spec.name] = tool
            self._need_sandbox("sandbox" in tool.injected)
            return target

        return add if function is None else add(function)

    @overload
    def reward(self, function: F) -> F: ...
    @overload
    def reward(
        self, *, weight: float = 1.0, timeout_s: float = TIMEOUT_S, retries: int = 1
    ) -> Callable[[F], F]: ...
    def reward(
        self, function: Any = None, *, weight: float = 1.0, timeout_s: float = TIMEOUT_S, retries: int = 1
    ) -> Any:
        """Makes a function of (task, trajectory) a weighted part of the reward; its name names the part."""
        if self.reward_name:
            raise ValueError(
                f"environment {self.name!r} already names the library reward {self.reward_name!r}; "
                "drop `reward=` from `@env`, or drop the decorated function"
            )

        def add(target: F) -> F:
            part = Part(target.__name__, target, weight, timeout_s, retries)
            if any(known.name == part.name for known in self.parts):
                raise ValueError(f"environment {self.name!r} has two rewards named {part.name!r}; rename one")
            self.parts.append(part)
            return target

        return add if function is None else add(function)

    def demonstrations(self, function: F) -> F:
        """Takes a generator of (task, messages), with the parameters of the task generator; for SFT."""
        self.demonstration_function = function
        return function

    def agent(self, program: P) -> P:
        """Takes the agent for scaffold=external: an async function of (task, access), or an `Agent`."""
        self.agent_program = as_agent(program)
        self._need_sandbox(inspect.isroutine(program) and "sandbox" in inspect.signature(program).parameters)
        if inside(self.agent_program):
            self.sandbox = reaching_model(self.sandbox)
        return program

    def setup(self, function: F) -> F:
        """Takes a function of (task, sandbox) that prepares a trajectory's own sandbox."""
        self.setup_function = function
        self._need_sandbox(True)
        return function

    def cleanup(self, function: F) -> F:
        """Takes a function of (task, sandbox) that runs after the trajectory, also after an error."""
        self.cleanup_function = function
        return function

    def _need_sandbox(self, needed: bool) -> None:
        if needed and self.sandbox is None:
            self.sandbox = SandboxSpec()
