"""A user's function chooses the next task from how often each one was solved so far.

The function gets one `TaskRate` for each task of a fixed pool (the first tasks of the training split) and
returns a weight for each, or the id of the task to take. Its choices and the rates are part of every
checkpoint; samples in the token log keep the task they began with, whatever the function would choose now.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from envs.base import Environment
from envs.plugins import Catalogue
from envs.types import Group, Task
from rl.rollout.buffer import outcomes
from rl.rollout.efforts import Efforts
from rl.rollout.stream import EmptySplitError

CURRICULA = Catalogue(
    kind="curriculum",
    group="tempering.curricula",
    builtins={"frontier": "rl.rollout.curriculum:frontier"},
)


class CurriculumError(ValueError):
    """A curriculum that chose nothing usable, or a task that is not in its pool."""


@dataclass(slots=True)
class TaskRate:
    """How one task went: groups that ended, scored samples in them, and those with an outcome above 0.

    `last` is the pass rate of its newest group; -1 before there is one.
    """

    task: str
    groups: int = 0
    samples: int = 0
    passed: int = 0
    last: float = -1.0

    @property
    def pass_rate(self) -> float | None:
        """The share of scored samples that passed; None before there is one."""
        return self.passed / self.samples if self.samples else None


Curriculum = Callable[[Sequence[TaskRate]], Sequence[float] | str]


def frontier(rates: Sequence[TaskRate]) -> list[float]:
    """Prefers tasks that are solved about half the time: p (1 - p), and new tasks most; none is forgotten."""
    weights = []
    for rate in rates:
        p = rate.pass_rate
        weights.append(0.25 if p is None else max(p * (1 - p), 0.01))
    return weights


def load_curriculum(name: str) -> Curriculum:
    """Returns the function of a name, an import path `package.module:function`, or `file.py:function`.

    Raises:
        PluginError: It cannot be had.
        CurriculumError: It is no function of one argument.
    """
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        found = getattr(CURRICULA.load_file(Path(file)), attribute, None)
    else:
        found = CURRICULA.resolve(name)
    if not callable(found) or len(inspect.signature(found).parameters) != 1:
        raise CurriculumError(
            f"rollout.curriculum.function={name} leads to {found!r}; it must be a function of one argument, "
            "the list of TaskRate, that returns a weight for each or the id of a task"
        )
    return cast(Curriculum, found)


class CurriculumStream:
    """The tasks of one environment as a curriculum chooses them; every task is drawn for each effort in turn.

    Raises:
        EmptySplitError: The split has no task.
    """

    def __init__(
        self,
        env: Environment,
        split: str,
        seed: int,
        efforts: Efforts | Sequence[int],
        curriculum: Curriculum,
        tasks: int,
    ) -> None:
        self._tasks: dict[str, Task] = {task.id: task for task in islice(env.tasks(split, seed), tasks)}
        if not self._tasks:
            raise EmptySplitError(f"environment {env.name!r} has no task in split {split!r}")
        self._where = f"environment {env.name!r}, split {split!r}"
        self._seed, self._efforts, self._choose = f"{seed}/{env.name}", Efforts.of(efforts), curriculum
        self.rates = {task: TaskRate(task) for task in self._tasks}
        self._chosen: dict[int, str] = {}
        self._ended: dict[int, int] = {}

    def draw(self, group: int) -> tuple[Task, int]:
        """Returns the task and the effort of group number `group`; asking again gives the same."""
        index, level = divmod(group, len(self._efforts))
        if index not in self._chosen:
            self._chosen[index] = self._next(index)
        return self._tasks[self._chosen[index]], self._efforts.of_task(index)[level]

    def observe(self, number: int, group: Group) -> None:
        """Counts the outcomes of a group that ended."""
        values = outcomes(group)
        rate = self.rates[group.task.id]
        rate.groups += 1
        rate.samples += len(values)
        rate.passed += sum(value > 0 for value in values)
        if values:
            rate.last = sum(value > 0 for value in values) / len(values)
        index = number // len(self._efforts)
        self._ended[index] = self._ended.get(index, 0) + 1
        if self._ended[index] == len(self._efforts):
            del self._ended[index], self._chosen[index]

    def pin(self, number: int, task: str) -> None:
        """Makes a group have the task that samples of it began with.

        Raises:
            CurriculumError: The pool does not have it.
        """
        if task not in self._tasks:
            raise CurriculumError(
                f"the token log has samples of task {task!r}, which is not in the curriculum's pool "
                f"({self._where}, {len(self._tasks)} tasks); resume with the settings that the run began with"
            )
        self._chosen[number // len(self._efforts)] = task

    def state_dict(self) -> dict[str, Any]:
        """Rates of tasks that were seen, and choices whose groups did not all end."""
        return {
            "rates": [asdict(rate) for rate in self.rates.values() if rate.groups],
            "chosen": [[index, task] for index, task in self._chosen.items()],
            "ended": [[index, count] for index, count in self._ended.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave, to a pool with the same tasks."""
        self.rates.update((entry["task"], TaskRate(**entry)) for entry in state["rates"])
        self._chosen = dict(state["chosen"])
        self._ended = dict(state["ended"])

    def _next(self, index: int) -> str:
        rates = list(self.rates.values())
        chosen = self._choose(rates)
        if isinstance(chosen, str):
            if chosen not in self._tasks:
                raise CurriculumError(
                    f"the curriculum chose {chosen!r}, which is no task of {self._where}; "
                    "return the id of a TaskRate that it was given, or a weight for each"
                )
            return chosen
        weights = [float(weight) for weight in chosen]
        usable = all(math.isfinite(weight) and weight >= 0 for weight in weights) and sum(weights) > 0
        if len(weights) != len(rates) or not usable:
            raise CurriculumError(
                f"the curriculum returned {len(weights)} weights for {len(rates)} tasks of {self._where}; it "
                "needs one finite weight of at least 0 for each, not all of them 0"
            )
        draw = random.Random(f"curriculum/{self._seed}/{index}")
        return draw.choices([rate.task for rate in rates], weights)[0]
