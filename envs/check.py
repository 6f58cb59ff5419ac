"""Proof that an environment is sound before anything is trained on it, without a model and without a sandbox.

Each finding is a `Check` that passed or says what is wrong and what to do. The verifier is proved by the gold
answers: they must score full marks, while empty, garbled and prompt-copying answers must score nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from envs.base import Environment
from envs.play import Judge, say
from envs.types import (
    FinishReason,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)

GARBAGE = ("", " ", "?", "the answer is unknown", "0x7f\x00", "!" * 2000)
TIME_LIMIT_S = 5.0
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Check:
    """One property: whether it holds, and if not, what is wrong and what to do."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All that was checked about one environment."""

    environment: str
    tasks: int
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Says whether every check passed."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [
            f"{'ok  ' if c.passed else 'FAIL'} {c.name}{': ' * bool(c.detail)}{c.detail}" for c in self.checks
        ]
        count = sum(check.passed for check in self.checks)
        return "\n".join(
            [*lines, f"{self.environment}: {count} of {len(lines)} checks on {self.tasks} tasks"]
        )


async def check_environment(
    env: Environment,
    n: int = 50,
    *,
    judge: Judge | None = None,
    full_marks: float = 1.0,
    consolation: float = 0.0,
) -> CheckReport:
    """Checks the first `n` tasks of every split.

    Args:
        env: The environment.
        n: Tasks of each split to look at.
        judge: The reward, when the environment names one of the library (`rewards.load(env.reward_name)`).
        full_marks: What the gold answer must score.
        consolation: What a garbled answer may score at most, for verifiers that give partial credit.
    """
    if n < 1:
        raise ValueError(f"a check needs at least one task of each split, not {n}")
    begin = time.monotonic()
    try:
        splits = {split: list(itertools.islice(env.tasks(split, 0), n)) for split in env.splits}
        again = {split: list(itertools.islice(env.tasks(split, 0), n)) for split in env.splits}
    except Exception as error:
        return CheckReport(env.name, 0, (Check("tasks", False, f"{type(error).__name__}: {error}"),))
    seconds = time.monotonic() - begin
    tasks = [task for split in splits.values() for task in split]
    checks = [
        _check("tasks", [f"split {split!r} has no task" for split, found in splits.items() if not found]),
        _check("time", [f"{seconds:.1f} s for {2 * len(tasks)} tasks"] if seconds > TIME_LIMIT_S else []),
        _check("determinism", _undetermined(splits, again)),
        _check("ids", _doubles(splits)),
        _check("splits", _overlaps(splits)),
        _check("picklable", _unpicklable(env, tasks)),
        _check("demonstrations", _bad_demonstrations(env, n)),
    ]
    checks += [check async for check in _verifier_checks(env, tasks, judge, full_marks, consolation)]
    return CheckReport(env.name, len(tasks), tuple(checks))


async def _verifier_checks(
    env: Environment, tasks: Sequence[Task], judge: Judge | None, full_marks: float, consolation: float
) -> AsyncIterator[Check]:
    if env.reward_name and judge is None:
        problem = f"judged by {env.reward_name!r} of the library; pass judge=rewards.load(env.reward_name)"
        yield Check("verifier", False, problem)
        return
    judge = judge or env.score
    missing = [f"{task.id} has no gold answer" for task in tasks if not (task.gold or "").strip()]
    yield _check("gold", missing)
    golden = [(task, task.gold) for task in tasks if task.gold and task.gold.strip()]
    yield _check("gold scores full marks", await _wrong_scores(judge, golden, full_marks, full_marks))
    yield _check("verifier is deterministic", await _changing(judge, golden))
    garbled = [
        (task, text) for task in tasks for text in (*GARBAGE, _shown(task)) if text.strip() != task.gold
    ]
    yield _check("garbage scores nothing", await _wrong_scores(judge, garbled, 0.0, consolation))


def answered(task: Task, text: str) -> Trajectory:
    """Returns a trajectory whose only turn answers `text`."""
    turn = Turn((), (), (), (), FinishReason.STOP, say(text))
    key = TrajectoryKey(task.id, 50, "check", 0, 0)
    return Trajectory(key, ((turn,),), Status.FINISHED, StopReason.ANSWER, Missing("not judged yet"))


async def _verdict(judge: Judge, task: Task, text: str) -> Score | Missing:
    try:
        async with asyncio.timeout(4 * TIME_LIMIT_S):
            return await judge(task, answered(task, text))
    except Exception as error:
        return Missing(f"{type(error).__name__}: {error}")


async def _wrong_scores(
    judge: Judge, answers: Sequence[tuple[Task, str]], low: float, high: float
) -> list[str]:
    problems: list[str] = []
    for task, text in answers:
        verdict = await _verdict(judge, task, text)
        if isinstance(verdict, Missing):
            problems.append(f"{task.id} has no verdict on {text[:40]!r}: {verdict.reason}")
        elif not low - _TOLERANCE <= verdict.value <= high + _TOLERANCE:
            problems.append(f"{task.id} scores {verdict.value:g} for {text[:40]!r}, not {low:g}")
    return problems


async def _changing(judge: Judge, answers: Sequence[tuple[Task, str]]) -> list[str]:
    pairs = [(t, await _verdict(judge, t, text), await _verdict(judge, t, text)) for t, text in answers[:10]]
    return [f"{task.id} scores {first}, then {second}" for task, first, second in pairs if first != second]


def _check(name: str, problems: Sequence[str]) -> Check:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Check(name, not problems, problems[0] + more if problems else "")


def _undetermined(splits: dict[str, list[Task]], again: dict[str, list[Task]]) -> list[str]:
    return [
        f"split {split!r} changes from call to call with the same seed; draw from random.Random(seed)"
        for split in splits
        if splits[split] != again[split]
    ]


def _doubles(splits: dict[str, list[Task]]) -> list[str]:
    problems: list[str] = []
    for split, tasks in splits.items():
        known: dict[str, str] = {}
        for task in tasks:
            if known.setdefault(task.id, task.content_hash) != task.content_hash:
                problems.append(f"split {split!r} has two different tasks with the id {task.id!r}")
    return problems


def _overlaps(splits: dict[str, list[Task]]) -> list[str]:
    problems: list[str] = []
    for one, other in itertools.combinations(splits, 2):
        shared = {task.id for task in splits[one]} & {task.id for task in splits[other]}
        problems += [f"task {task_id!r} is in {one!r} and in {other!r}" for task_id in sorted(shared)]
    return problems


def _shown(task: Task) -> str:
    return "\n".join(message.content for message in task.prompt)


def _unpicklable(env: Environment, tasks: Sequence[Task]) -> list[str]:
    problems: list[str] = []
    for what, value in (("the environment", env), ("a task", tuple(tasks))):
        try:
            pickle.loads(pickle.dumps(value))
        except Exception as error:
            problems.append(f"{what} cannot be sent to another process: {type(error).__name__}: {error}")
    return problems


def _bad_demonstrations(env: Environment, n: int) -> list[str]:
    try:
        shown = list(itertools.islice(env.demonstrations(env.splits[0], 0), n))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return [f"{task.id}: {problem}" for task, messages in shown if (problem := _bad_episode(env, messages))]


def _bad_episode(env: Environment, messages: Sequence[Message]) -> str:
    names = {tool.name for tool in env.tools}
    if not messages or messages[-1].role != Role.ASSISTANT:
        return "must end with a turn of the assistant"
    if sum(message.role == Role.ASSISTANT for message in messages) > env.max_turns:
        return f"has more than max_turns = {env.max_turns} turns"
    if getattr(env, "agent", None) is not None:
        return ""  # an agent program brings its own tools
    unknown = [call.name for m in messages for call in m.tool_calls if call.name not in names]
    return f"calls an unknown tool {unknown[0]!r}" if unknown else ""
