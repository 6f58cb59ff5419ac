"""Which task and effort the g-th group gets: a pure function of the seed, so that a resume repeats it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.base import Environment
from envs.types import Group, Task
from rl.rollout.efforts import Efforts


class EmptySplitError(ValueError):
    """A split without a task."""


@dataclass(slots=True)
class TaskStream:
    """Draws tasks of one split in a fixed order; a finite split starts over in a new order.

    Every task is drawn once for each of its `efforts` in turn, so that the groups of one task differ in
    effort only. Group numbers are drawn in ascending order; asking for an earlier one starts over.
    """

    env: Environment
    split: str
    seed: int
    efforts: Efforts | Sequence[int]
    _efforts: Efforts = field(init=False, repr=False)
    _tasks: Iterator[Task] = field(init=False, repr=False)
    _index: int = field(init=False, default=-1)
    _current: Task | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._efforts = Efforts.of(self.efforts)
        self._tasks = self._endless()

    def draw(self, group: int) -> tuple[Task, int]:
        """Returns the task and the effort of group number `group` (0-based)."""
        index, level = divmod(group, len(self._efforts))
        if index < self._index:
            self._tasks, self._index = self._endless(), -1
        while self._index < index:
            self._current = next(self._tasks)
            self._index += 1
        assert self._current is not None
        return self._current, self._efforts.of_task(index)[level]

    def observe(self, number: int, group: Group) -> None:
        """A fixed order learns nothing."""

    def pin(self, number: int, task: str) -> None:
        """A fixed order gives every group its task again."""

    def state_dict(self) -> dict[str, Any]:
        """A fixed order has no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A fixed order has no state."""

    def _endless(self) -> Iterator[Task]:
        epoch = 0
        while True:
            count = 0
            for task in self.env.tasks(self.split, self.seed + 1_000_003 * epoch):
                count += 1
                yield task
            if count == 0:
                raise EmptySplitError(
                    f"environment {self.env.name!r} has no task in split {self.split!r}; "
                    f"its splits are {', '.join(self.env.splits)}"
                )
            epoch += 1
