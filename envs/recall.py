"""Looking up a value that stands far back: the smallest task that attention over a short window cannot do.

The policy reads `length` pairs of a letter and a digit and is asked for the digit of one letter, as in
`k3a7c1...?k`. The pair asked for always stands at least `window` tokens before the end of the prompt (one
token a character), so a sliding window over the last `window` tokens never holds it at the question. Digits
are drawn independently, so the pairs inside the window say nothing: chance is exactly `CHANCE`.

Layers of short windows can hand information on, but only before it is known what will be asked. With many
candidate pairs that is more than a small policy can carry, so a high score speaks for the long look-back.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Iterator, Sequence

from envs.registry import env
from envs.types import Message, Role, Task

CHANCE = 0.1
_HELD_OUT_EIGHTHS = 1


@env("recall", splits=("train", "eval"), reward="exact")
def recall(split: str, seed: int, length: int = 16, window: int = 16) -> Iterator[Task]:
    """Yields endless tasks; whether a list of pairs is held out is a property of the list."""
    candidates = _candidates(length, window)
    draw = random.Random(f"recall/{split}/{seed}/{length}/{window}")
    while True:
        letters = draw.sample(string.ascii_lowercase, length)
        digits = [draw.choice(string.digits) for _ in range(length)]
        pairs = "".join(letter + digit for letter, digit in zip(letters, digits, strict=True))
        index = draw.randrange(candidates)
        if _held_out(pairs) == (split == "eval"):
            question = f"{pairs}?{letters[index]}"
            yield Task.ask(f"recall/{question}", question, gold=digits[index])


@recall.demonstrations
def demonstrations(
    split: str, seed: int, length: int = 16, window: int = 16
) -> Iterator[tuple[Task, Sequence[Message]]]:
    """Yields the tasks with their right answers."""
    for task in recall(length=length, window=window).tasks(split, seed):
        yield task, [Message(Role.ASSISTANT, task.gold or "")]


def _candidates(length: int, window: int) -> int:
    """Returns how many of the first pairs stand at least `window` tokens before the end of the prompt."""
    count = length - (window + 1) // 2 + 1
    if not 1 <= length <= len(string.ascii_lowercase) or window < 1 or count < 1:
        raise ValueError(
            f"recall needs a length of 1..{len(string.ascii_lowercase)} pairs (two tokens each) of which one "
            f"stands `window` tokens before the end, not length={length}, window={window}"
        )
    return min(count, length)


def _held_out(pairs: str) -> bool:
    return hashlib.sha256(pairs.encode()).digest()[0] % 8 < _HELD_OUT_EIGHTHS
