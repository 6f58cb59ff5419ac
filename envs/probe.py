"""A hidden sign and a noisy sensor: how much to ask depends on the effort, and the best policy is known.

Each reading of the sensor is right with probability `RELIABILITY`. With a penalty on length that depends on
the effort (`rewards.length`), the best policy asks until the lead of one sign over the other is worth no
further question; `optimum` computes it by dynamic programming. The demonstrations ask until a lead that is
drawn at random, whatever the effort, so reinforcement learning alone must tie length to effort. Readings are
signs, as a small policy that counts digits would count those of the effort too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from envs.base import ToolError
from envs.registry import env
from envs.types import Message, Role, Task, ToolCall

EFFORTS = (1, 25, 50, 75, 100)
SIGNS = "-+"
RELIABILITY = 0.7
QUESTIONS = 11
LEADS = (0, 1, 1, 2, 2, 3, 3, 4)
CARELESS = 0.15


@env("probe", splits=("train", "eval"), max_turns=QUESTIONS + 2, reward="exact", efforts=EFFORTS)
def probe(split: str, seed: int) -> Iterator[Task]:
    """Yields endless tasks, which all look alike; even numbers are for training, odd ones held out."""
    draw = random.Random(f"probe/{split}/{seed}")
    while True:
        number = 2 * draw.getrandbits(40) + (split == "eval")
        yield Task.ask(f"probe/{number}", "?", gold=SIGNS[_noise(f"probe/{number}", "sign") & 1])


@probe.tool(stateless=True)
def ask(question: str, task: Task, number: int) -> str:
    """Reads the sensor once; the text of the question does not matter."""
    if number >= QUESTIONS:
        raise ToolError("x")
    return reading(task, number)


@probe.demonstrations
def demonstrations(split: str, seed: int) -> Iterator[tuple[Task, Sequence[Message]]]:
    """Yields episodes that ask until some lead and answer by it; a few answer carelessly."""
    draw = random.Random(f"probe/demonstrations/{split}/{seed}")
    for task in probe().tasks(split, seed):
        enough, lead, readings = draw.choice(LEADS), 0, list[str]()
        while abs(lead) < enough and len(readings) < QUESTIONS:
            readings.append(reading(task, len(readings)))
            lead = readings.count("+") - readings.count("-")
        answer = draw.choice(SIGNS) if lead == 0 or draw.random() < CARELESS else SIGNS[lead > 0]
        messages: list[Message] = []
        for number, value in enumerate(readings):
            call = ToolCall("ask", {"question": "?"}, f"call_{number}", number)
            messages.append(Message(Role.ASSISTANT, tool_calls=(call,)))
            messages.append(Message(Role.TOOL, value, tool_call_id=call.id))
        yield task, [*messages, Message(Role.ASSISTANT, answer)]


def reading(task: Task, number: int) -> str:
    """Returns the `number`-th reading of a task's sensor: a function of both, so a resume repeats it."""
    sign = SIGNS.index(task.gold or "-")
    right = _noise(task.id, f"reading/{number}") < RELIABILITY * 2**64
    return SIGNS[sign if right else 1 - sign]


@dataclass(frozen=True, slots=True)
class Optimum:
    """What the reward-maximal policy reaches: expected reward, accuracy and sampled tokens."""

    reward: float
    accuracy: float
    tokens: float


def optimum(penalty: Callable[[int], float], *, question_tokens: int, answer_tokens: int) -> Optimum:
    """Solves the task for a penalty (0 or less) on the number of sampled tokens, by dynamic programming.

    The state is the number of questions asked and the lead of one sign; the posterior that the leading one is
    right depends on the lead alone.
    """

    @cache
    def value(asked: int, lead: int) -> tuple[float, float, float]:
        right = 1 / (1 + ((1 - RELIABILITY) / RELIABILITY) ** lead)
        tokens = asked * question_tokens + answer_tokens
        stop = (right + penalty(tokens), right, float(tokens))
        if asked == QUESTIONS:
            return stop
        up = right * RELIABILITY + (1 - right) * (1 - RELIABILITY)
        more, less = value(asked + 1, lead + 1), value(asked + 1, abs(lead - 1))
        go = tuple(up * a + (1 - up) * b for a, b in zip(more, less, strict=True))
        return max(stop, (go[0], go[1], go[2]))

    return Optimum(*value(0, 0))


def _noise(task_id: str, purpose: str) -> int:
    """Returns 64 bits that depend on the arguments only."""
    return int.from_bytes(hashlib.sha256(f"{task_id}/{purpose}".encode()).digest()[:8])
