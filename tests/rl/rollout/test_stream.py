from collections.abc import Iterator

import pytest

from envs.types import Task
from rl.rollout.stream import EmptySplitError, TaskStream


class Numbers:
    name = "numbers"
    splits = ("train", "empty")

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for i in range(3 if split == "train" else 0):
            yield Task(id=f"{seed % 1000}-{i}", prompt=())


def stream(split: str = "train", efforts: tuple[int, ...] = (25, 75)) -> TaskStream:
    return TaskStream(Numbers(), split, 5, efforts)


def test_each_task_is_drawn_once_at_each_effort() -> None:
    drawn = [stream().draw(g) for g in range(4)]
    assert [(task.id, effort) for task, effort in drawn] == [
        ("5-0", 25),
        ("5-0", 75),
        ("5-1", 25),
        ("5-1", 75),
    ]


def test_a_finite_split_starts_over_in_a_new_order() -> None:
    tasks = stream(efforts=(50,))
    assert [tasks.draw(g)[0].id for g in range(5)] == ["5-0", "5-1", "5-2", "8-0", "8-1"]


def test_a_group_gets_the_same_task_whenever_it_is_asked() -> None:
    tasks = stream()
    late = tasks.draw(9)
    assert tasks.draw(1)[0].id == "5-0"
    assert tasks.draw(9) == late == stream().draw(9)


def test_an_empty_split_is_an_error_that_names_the_splits() -> None:
    with pytest.raises(EmptySplitError, match=r"no task in split 'empty'.*train, empty"):
        stream("empty").draw(0)
