"""Sorting a few letters: one turn, no tool, learnt in a minute; the smoke test of a training run.

A third of the demonstrations have one letter wrong, which leaves reinforcement learning something to sharpen.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

from envs.registry import env
from envs.types import Message, Role, Task

LETTERS = "abcdefghij"
CORRUPTED = 0.35


@env("sort", splits=("train", "eval"), reward="exact")
def sort(split: str, seed: int, shortest: int = 4, longest: int = 9) -> Iterator[Task]:
    """Yields endless words of `shortest` to `longest` letters; words of the same letters are of one split."""
    if not 1 <= shortest <= longest:
        raise ValueError(f"sort needs 1 <= shortest <= longest, not shortest={shortest}, longest={longest}")
    draw = random.Random(f"sort/{split}/{seed}/{shortest}/{longest}")
    while True:
        word = "".join(draw.choice(LETTERS) for _ in range(draw.randint(shortest, longest)))
        answer = "".join(sorted(word))
        if _held_out(answer) == (split == "eval"):
            yield Task.ask(f"sort/{word}", f"sort:{word}=", gold=answer)


@sort.demonstrations
def demonstrations(
    split: str, seed: int, shortest: int = 4, longest: int = 9
) -> Iterator[tuple[Task, Sequence[Message]]]:
    """Yields answers of which `CORRUPTED` have one letter redrawn."""
    draw = random.Random(f"sort/demonstrations/{split}/{seed}")
    for task in sort(shortest=shortest, longest=longest).tasks(split, seed):
        answer = list(task.gold or "")
        if draw.random() < CORRUPTED:
            answer[draw.randrange(len(answer))] = draw.choice(LETTERS)
        yield task, [Message(Role.ASSISTANT, "".join(answer))]


def _held_out(answer: str) -> bool:
    return hashlib.sha256(answer.encode()).digest()[0] % 8 == 0
