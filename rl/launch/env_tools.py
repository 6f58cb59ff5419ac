"""`temper env`: which environments there are, whether one is sound, a new one, and an episode by hand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import envs.registry
import rewards
from envs.base import Environment, Sampled
from envs.check import check_environment
from envs.play import Speaker, play, say, script
from envs.template import init_template
from envs.types import FinishReason, Message, Missing, Role, Task, ToolCall, Trajectory
from rewards import unit_tests
from sandbox.base import Sandbox
from sandbox.client import Fleet

GATED = 2
"""Of each split: a task with hidden tests is tried in nine ways."""


def list_lines() -> list[str]:
    """Returns one line an environment: its name and where it comes from."""
    return [f"{name:<16} {origin}" for name, origin in sorted(envs.registry.list_environments().items())]


def check(name: str, count: int) -> int:
    """Checks an environment and prints the report; returns 0 when everything holds, else 1."""
    env = envs.registry.load(name)
    judge = rewards.load(env.reward_name) if env.reward_name else None
    report = asyncio.run(check_environment(env, count, judge=judge))
    print(report)
    wrong = asyncio.run(_gate(env, min(count, GATED))) if env.reward_name == "unit_tests" else []
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return 0 if report.passed and not wrong else 1


async def _gate(env: Environment, count: int) -> list[str]:
    """Tries the hidden tests of the first tasks of each split with no work and with the canned cheats."""
    from rl.driver import fleet_state

    tasks = [task for split in env.splits for task in itertools.islice(env.tasks(split, 0), count)]
    owner = f"check-{os.getpid()}"
    async with await Fleet.connect("local", state_dir=fleet_state(), owner=owner) as fleet:
        return [line for task in tasks for line in await unit_tests.failed_tries(fleet, task)]


def init(name: str, folder: Path) -> Path:
    """Writes the source of a new environment and returns its path.

    Raises:
        ValueError: The name cannot be used, or the file exists.
    """
    text = init_template(name)
    path = folder / f"{name.rpartition('/')[2].replace('-', '_')}.py"
    if path.exists():
        raise ValueError(f"{path} exists; remove it, or choose another name")
    path.write_text(text, encoding="utf-8")
    return path


def play_once(name: str, *, split: str, number: int, demonstration: bool, backend: str) -> None:
    """Plays one episode with the person at the terminal (or a demonstration) in place of a policy.

    Raises:
        ValueError: There is no such split, task, or demonstration.
    """
    env = envs.registry.load(name)
    if split not in env.splits:
        raise ValueError(f"environment {name!r} has no split {split!r}; it has {', '.join(env.splits)}")
    task, speaker = (
        _demonstrated(env, split, number) if demonstration else (_task(env, split, number), by_hand(env))
    )
    trajectory = asyncio.run(_play(env, task, speaker, backend))
    print("\n".join(transcript(task, trajectory)))


def transcript(task: Task, trajectory: Trajectory) -> list[str]:
    """Returns an episode as lines: who said what, and the verdict."""
    lines = [f"{message.role}: {message.content}" for message in task.prompt]
    for turn in trajectory.turns:
        lines += [f"call: {call.name} {json.dumps(dict(call.arguments))}" for call in turn.message.tool_calls]
        lines += [f"assistant: {turn.message.content}"] if turn.message.content else []
        lines += [f"{message.role}: {message.content}" for message in turn.observations]
    score = trajectory.score
    verdict = f"no score: {score.reason}" if isinstance(score, Missing) else f"reward {score.value:g}"
    return [*lines, f"{trajectory.stop}, {verdict}"]


def read_turn(env: Environment, line: str, number: int) -> Message:
    """Turns a typed line into a turn: `/tool text` or `/tool {"argument": ...}` calls, else it answers.

    Raises:
        ValueError: There is no such tool, or its arguments cannot be read.
    """
    if not line.startswith("/"):
        return say(line)
    name, _, rest = line[1:].partition(" ")
    spec = next((tool for tool in env.tools if tool.name == name), None)
    if spec is None:
        raise ValueError(
            f"there is no tool {name!r}; there are {', '.join(t.name for t in env.tools) or 'none'}"
        )
    if rest.lstrip().startswith("{"):
        arguments = json.loads(rest)
    else:
        names = list(spec.parameters.get("properties", {}))
        if len(names) != 1:
            raise ValueError(
                f'{name} has arguments {", ".join(names)}; write /{name} {{"argument": value, ...}}'
            )
        arguments = {names[0]: rest}
    return Message(Role.ASSISTANT, tool_calls=(ToolCall(name, arguments, f"call_{number}", number),))


def by_hand(env: Environment) -> Speaker:
    """Returns a speaker that shows what is new and reads a turn from the terminal."""
    shown = 0

    async def speak(conversation: Sequence[Message]) -> Sampled:
        nonlocal shown
        for message in conversation[shown:]:
            print(f"{message.role}: {message.content}")
        shown = len(conversation) + 1
        while True:
            line = await asyncio.to_thread(input, "you (/tool ... calls one): ")
            try:
                return Sampled(read_turn(env, line, len(conversation)), FinishReason.STOP)
            except ValueError as error:
                print(error)

    return speak


async def _play(env: Environment, task: Task, speaker: Speaker, backend: str) -> Trajectory:
    judge = rewards.load(env.reward_name) if env.reward_name else None
    async with _sandbox(env, backend) as box:
        return await play(env, task, speaker, judge=judge, sandbox=box)


@contextlib.asynccontextmanager
async def _sandbox(env: Environment, backend: str) -> AsyncIterator[Sandbox | None]:
    if env.sandbox is None:
        yield None
        return
    from rl.driver import fleet_state

    owner = f"play-{os.getpid()}"
    async with (
        await Fleet.connect("local", backend=backend, state_dir=fleet_state(), owner=owner) as fleet,
        await fleet.create(env.sandbox) as box,
    ):
        yield box


def _task(env: Environment, split: str, number: int) -> Task:
    task = next(itertools.islice(env.tasks(split, 0), number, None), None)
    if task is None:
        raise ValueError(f"split {split!r} of {env.name!r} has no task number {number}")
    return task


def _demonstrated(env: Environment, split: str, number: int) -> tuple[Task, Speaker]:
    shown = next(itertools.islice(env.demonstrations(split, 0), number, None), None)
    if shown is None:
        raise ValueError(f"environment {env.name!r} has no demonstration number {number} in split {split!r}")
    task, messages = shown
    return task, script(*(message for message in messages if message.role == Role.ASSISTANT))
