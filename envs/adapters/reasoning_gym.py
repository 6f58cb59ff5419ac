"""The generators of the `reasoning-gym` package (over a hundred procedural tasks) as one environment."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from envs.base import ToolError
from envs.killable import TIMEOUT_S, call_killable
from envs.plugins import BrokenPluginError
from envs.types import Message, Missing, Score, Task, ToolCall, ToolSpec, Trajectory
from sandbox.base import Sandbox
from sandbox.types import SandboxSpec


class ReasoningGym:
    """Tasks of one generator; held-out ones come from seeds of their own. Further options are passed on.

    Raises:
        BrokenPluginError: `reasoning-gym` is not installed, or has no such generator.
    """

    name = "reasoning_gym"
    splits = ("train", "eval")
    tools: tuple[ToolSpec, ...] = ()
    sandbox: SandboxSpec | None = None
    max_turns = 1
    reward_name = ""
    efforts = (50,)

    def __init__(self, generator: str, size: int = 500, **options: Any) -> None:
        try:
            self._make: Any = importlib.import_module("reasoning_gym").create_dataset
        except ImportError as error:
            raise BrokenPluginError(
                "the environment 'reasoning_gym' needs a package: `pip install reasoning-gym`"
            ) from error
        self.generator, self.size, self.options = generator, size, options
        try:
            self._dataset(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise BrokenPluginError(
                f"reasoning-gym cannot make {generator!r} with {options}: {error}"
            ) from error

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yields `size` tasks; `seed` gives other tasks, and those of the splits never share a seed."""
        number = 2 * (seed % 2**30) + (split == "eval")
        for index, entry in enumerate(self._dataset(number)):
            task_id = f"{self.generator}/{number}/{index}"
            yield Task.ask(task_id, entry["question"], gold=str(entry["answer"]), seed=number, index=index)

    def demonstrations(self, split: str, seed: int) -> Iterator[tuple[Task, tuple[Message, ...]]]:
        """Yields the tasks with their reference answers."""
        return ((task, (Message("assistant", task.gold or ""),)) for task in self.tasks(split, seed))

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """There is nothing to prepare."""

    async def cleanup(self, task: Task, sandbox: Sandbox | None) -> None:
        """There is nothing to end."""

    async def call_tool(self, call: ToolCall, task: Task, sandbox: Sandbox | None) -> str:
        """Raises `ToolError`: there are no tools."""
        raise ToolError("there is no tool here")

    async def score(self, task: Task, trajectory: Trajectory) -> Score | Missing:
        """Judges by the generator's own rule, which may give partial credit."""
        options = {**self.options, "size": self.size, "seed": task.private["seed"]}
        arguments = (self.generator, options, task.private["index"], trajectory.answer)
        try:
            return Score(await call_killable(score_answer, arguments, timeout_s=TIMEOUT_S))
        except TimeoutError:
            return Missing(f"timeout after {TIMEOUT_S:g} s")

    def _dataset(self, seed: int) -> Any:
        return self._make(self.generator, size=self.size, seed=seed, **self.options)


def score_answer(generator: str, options: dict[str, Any], index: int, answer: str) -> float:
    """Judges one answer by the generator's rule; runs in a process of its own, for some rules are slow."""
    dataset = importlib.import_module("reasoning_gym").create_dataset(generator, **options)
    return float(dataset.score_answer(answer, dataset[index]))
