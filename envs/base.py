"""What an environment and a scaffold are; the episode is what the rollout worker hands to a scaffold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from envs.types import FinishReason, Message, Missing, Score, StopReason, Task, ToolCall, ToolSpec, Trajectory
from sandbox.base import Sandbox
from sandbox.types import SandboxSpec


@dataclass(frozen=True, slots=True)
class Sampled:
    """One assistant turn as a scaffold sees it. `parse_error` says why tool calls could not be read."""

    message: Message
    finish: FinishReason
    parse_error: str = ""


class Episode(Protocol):
    """One trajectory in the making: the framework owns tokens, log and limits, the scaffold the messages."""

    task: Task
    effort: int
    tools: tuple[ToolSpec, ...]
    max_turns: int

    async def sample(self) -> Sampled:
        """Lets the policy speak: one assistant turn."""
        ...

    async def execute(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        """Runs tool calls and appends their results to the conversation. A tool's own failure is a result."""
        ...

    def observe(self, *messages: Message) -> None:
        """Appends messages of the scaffold's own (a format reminder, say) to the conversation."""
        ...


class Scaffold(Protocol):
    """How the policy is put to work: drives an episode to its end and says why it ended."""

    name: str

    async def run(self, episode: Episode) -> StopReason:
        """Runs one episode."""
        ...


class Environment(Protocol):
    """Problem, environment and verification: everything about one kind of task.

    `sandbox` is None when no tool needs one. `efforts` are the levels it is trained at unless the run says
    otherwise. `reward_name` names a reward of the library; when it is empty the environment scores itself.
    """

    name: str
    splits: tuple[str, ...]
    tools: tuple[ToolSpec, ...]
    sandbox: SandboxSpec | None
    max_turns: int
    reward_name: str
    efforts: tuple[int, ...]

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yields the tasks of a split in an order fixed by `seed`; the same call yields the same tasks.

        The iterator may be endless.
        """
        ...

    def demonstrations(self, split: str, seed: int) -> Iterator[tuple[Task, tuple[Message, ...]]]:
        """Yields tasks with the turns (assistant and tool messages) of an example episode, for SFT.

        The iterator may be endless; it is empty when the environment has no demonstrations.
        """
        ...

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Prepares a trajectory's own sandbox before the first turn; does nothing for stateless tools."""
        ...

    async def cleanup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Ends what `setup` began. Runs also after an error; must bear being called twice."""
        ...

    async def call_tool(self, call: ToolCall, task: Task, sandbox: Sandbox | None) -> str:
        """Runs one tool call and returns the observation. Raises `ToolError` for a call at fault."""
        ...

    async def score(self, task: Task, trajectory: Trajectory) -> Score | Missing:
        """Judges a finished trajectory; used when `reward_name` is empty. An exception becomes `Missing`."""
        ...


class ToolError(ValueError):
    """A tool call that is the policy's own fault; its text goes back to the policy as the observation."""
