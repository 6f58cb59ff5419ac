"""Composition of a reward from weighted parts, under one rule: a verdict is whole or it is missing.

A part that raises, runs past its time limit or returns NaN is tried again within its budget; when it still
has no value the whole score is `Missing`. It is never re-weighted over the other parts and never 0, because
a failure of the verifier says nothing about the policy.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from envs.killable import TIMEOUT_S, call_killable
from envs.types import Boundary, Missing, Score, Task, Trajectory
from sandbox.errors import SandboxError

Verdict = float | Score | Missing
RewardFunction = Callable[[Task, Trajectory], Verdict | Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class Part:
    """One named, weighted part of a reward. Weight 0 makes it a metric that is logged and does not count.

    A plain `def` runs in a process of its own that is killed at the time limit; an `async def` runs in the
    event loop, where the limit acts at its awaits.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    timeout_s: float = TIMEOUT_S
    retries: int = 1

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight) or self.timeout_s <= 0 or self.retries < 0:
            raise ValueError(
                f"reward part {self.name!r} needs a finite weight, a time limit above 0 and retries of 0 or "
                f"more, not weight={self.weight}, timeout_s={self.timeout_s}, retries={self.retries}"
            )


async def judge(parts: Sequence[Part], task: Task, trajectory: Trajectory) -> Score | Missing:
    """Judges by all parts at once. The value is the weighted sum; `parts` of the score are unweighted."""
    if not parts:
        raise ValueError("a reward needs at least one part")
    values = await asyncio.gather(*(judge_part(part, task, trajectory) for part in parts))
    total, named = 0.0, dict[str, float]()
    for part, value in zip(parts, values, strict=True):
        if isinstance(value, Missing):
            return Missing(f"{part.name}: {value.reason}", value.boundary)
        total += part.weight * value.value
        named |= {f"{part.name}.{name}": v for name, v in value.parts.items()} | {part.name: value.value}
    return Score(total, named)


async def judge_part(part: Part, task: Task, trajectory: Trajectory) -> Score | Missing:
    """Judges by one part, trying again after a failure. Never raises on account of the part."""
    verdict: Score | Missing = Missing("was never asked")
    for _ in range(part.retries + 1):
        verdict = await _attempt(part, task, trajectory)
        if isinstance(verdict, Score):
            break
    return verdict


async def _attempt(part: Part, task: Task, trajectory: Trajectory) -> Score | Missing:
    try:
        return _whole(await _call(part, task, trajectory))
    except TimeoutError:
        return Missing(f"timeout after {part.timeout_s:g} s")
    except SandboxError as error:
        return Missing(f"{type(error).__name__}: {error}", Boundary.SANDBOX)
    except Exception as error:
        return Missing(f"{type(error).__name__}: {error}", Boundary.REWARD)


async def _call(part: Part, task: Task, trajectory: Trajectory) -> Verdict:
    function = part.function
    if not is_async(function):
        return await call_killable(function, (task, trajectory), timeout_s=part.timeout_s)
    async with asyncio.timeout(part.timeout_s):
        result = function(task, trajectory)
        return await result if inspect.isawaitable(result) else result


def is_async(function: Callable[..., object]) -> bool:
    """Says whether calling it gives an awaitable: a coroutine function, or an object with such a call."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _whole(verdict: object) -> Score | Missing:
    """Checks a verdict: numbers only, all finite."""
    if isinstance(verdict, Missing):
        return verdict
    score = verdict if isinstance(verdict, Score) else None
    if score is None:
        if not isinstance(verdict, (int, float)):
            return Missing(f"returned {type(verdict).__name__}, not a number or a Score")
        score = Score(float(verdict))
    if not all(math.isfinite(value) for value in (score.value, *score.parts.values())):
        return Missing("returned a value that is not finite")
    return score
