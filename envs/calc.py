"""Products of two two-digit numbers, with a calculator in the sandbox: the smallest task that needs a tool.

About one in twenty unordered pairs of factors is held out, so that no evaluation task is a training task
with its factors exchanged. The demonstrations imitate a mediocre user of the tool: most guess blindly, some
of those who call it mistype the last digit, some copy badly. What is left to reinforcement learning
is to always call, and to copy with care.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

from envs.base import ToolError
from envs.registry import env
from envs.types import Message, Role, Task, ToolCall
from sandbox.base import Sandbox
from sandbox.errors import InfrastructureError

LOWEST, HIGHEST = 11, 99
HELD_OUT_PAIRS = 200
RESULT_CHARACTERS = 6
GUESS, MISTYPED, DROPPED = 0.6, 0.3, 0.2

_EVALUATE = """\
import sys
try:
    value = eval(sys.stdin.read(), {"__builtins__": {}})
    sys.stdout.write(str(value))
except Exception:
    sys.exit(3)
"""


@env("calc", splits=("train", "eval"), max_turns=3, reward="exact")
def calc(split: str, seed: int) -> Iterator[Task]:
    """Yields every ordered pair of factors of the split once, in an order drawn from `seed`."""
    pairs = list(factors(split))
    random.Random(f"calc/{split}/{seed}").shuffle(pairs)
    for a, b in pairs:
        yield _task(a, b)


@calc.tool(stateless=True)
async def python(expression: str, sandbox: Sandbox) -> str:
    """Evaluates an arithmetic expression."""
    data = expression.encode("utf-8", "replace")
    result = await sandbox.python(_EVALUATE, stdin=data, timeout_s=2.0, output_limit=4096)
    lost = result.exit_code is None and not result.timed_out and not result.oom
    if lost:
        raise InfrastructureError(
            "the sandbox cannot say how the calculation ended; look at the sandbox's own log"
        )
    if result.exit_code != 0 or not result.stdout:
        raise ToolError("err")
    return result.stdout.decode("utf-8", "replace")[:RESULT_CHARACTERS]


@calc.demonstrations
def demonstrations(split: str, seed: int) -> Iterator[tuple[Task, Sequence[Message]]]:
    """Yields endless sloppy episodes. The observation shown is the true result of the call that was made."""
    pairs = factors(split)
    draw = random.Random(f"calc/demonstrations/{split}/{seed}")
    while True:
        a, b = draw.choice(pairs)
        yield _task(a, b), _guess(draw) if draw.random() < GUESS else _use(a, b, draw)


@cache
def factors(split: str) -> tuple[tuple[int, int], ...]:
    """Returns the ordered pairs of factors of a split: "eval" has the held-out ones, "train" the others."""
    numbers = range(LOWEST, HIGHEST + 1)
    unordered = [(a, b) for a in numbers for b in numbers if a <= b]
    held_out = set(random.Random("calc/held-out").sample(unordered, HELD_OUT_PAIRS))
    wanted = split == "eval"
    return tuple((a, b) for a in numbers for b in numbers if ((min(a, b), max(a, b)) in held_out) == wanted)


def _task(a: int, b: int) -> Task:
    return Task.ask(f"calc/{a}*{b}", f"{a}*{b}=", gold=str(a * b))


def _guess(draw: random.Random) -> list[Message]:
    return [Message(Role.ASSISTANT, f"{draw.randint(1, 9)}00")]


def _use(a: int, b: int, draw: random.Random) -> list[Message]:
    if draw.random() < MISTYPED:
        b = b - b % 10 + draw.randint(0, 9)
    result = str(a * b)
    call = ToolCall("python", {"expression": f"{a}*{b}"}, "call_0", 0)
    answer = result[:-1] if draw.random() < DROPPED else result
    return [
        Message(Role.ASSISTANT, tool_calls=(call,)),
        Message(Role.TOOL, result, tool_call_id="call_0"),
        Message(Role.ASSISTANT, answer),
    ]
