"""Workers over the scripted engine, and an environment that keeps state and misbehaves on demand."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import envs.registry
import envs.scaffolds
import rewards
from envs.types import (
    Missing,
    Score,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)
from rl.rollout.config import RolloutConfig
from rl.rollout.state import Recovery
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from sandbox.types import SandboxSpec
from tests.rl.rollout.scripted import (
    CHAT,
    Boxes,
    Plan,
    ScriptedEngine,
)


class SandboxDied(Exception):
    """As the fleet would raise it."""

    __module__ = "sandbox.errors"


class Shop:
    """An environment with one tool that keeps state, and switches to make it misbehave."""

    name = "shop"
    splits = ("train",)
    tools = (
        ToolSpec(
            "buy",
            "Buys.",
            {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
        ),
    )
    sandbox: SandboxSpec | None = SandboxSpec()
    max_turns = 3
    reward_name = ""
    efforts = (50,)

    def __init__(self) -> None:
        self.bought: list[tuple[str, int | None]] = []
        self.error: Exception | None = None
        self.block_s = 0.0
        self.wait_s = 0.0
        self.value: float | Exception = 1.0
        self.cleaned = 0
        self.setup_error: Exception | None = None

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        yield Task.ask("t", "1")

    def demonstrations(self, split: str, seed: int) -> Iterator[Any]:
        yield from ()

    async def setup(self, task: Task, sandbox: Any) -> None:
        assert sandbox is not None
        if self.setup_error is not None:
            raise self.setup_error

    async def cleanup(self, task: Task, sandbox: Any) -> None:
        self.cleaned += 1

    async def call_tool(self, call: ToolCall, task: Task, sandbox: Any) -> str:
        if self.error is not None:
            raise self.error
        time.sleep(self.block_s)  # noqa: ASYNC251  the fault under test
        await asyncio.sleep(self.wait_s)
        self.bought.append((call.arguments["what"], call.number))
        return str(len(self.bought))

    async def score(self, task: Task, trajectory: Trajectory) -> Score | Missing:
        if isinstance(self.value, Exception):
            raise self.value
        return Score(self.value)


def config(**settings: Any) -> RolloutConfig:
    return RolloutConfig(**{"deadline_s": 20.0, "max_total_tokens": 64, **settings})


def calc_worker(engine: ScriptedEngine, boxes: Boxes, log: TokenLog | None = None, **settings: Any) -> Worker:
    env = envs.registry.load("calc")
    reward = rewards.load("exact")
    scaffold = envs.scaffolds.load("tools")
    return Worker(env, scaffold, engine, CHAT, boxes, reward, log, config(**settings))


def shop_worker(
    plan: Plan,
    env: Shop | None = None,
    boxes: Boxes | None = None,
    log: TokenLog | None = None,
    **settings: Any,
) -> tuple[Worker, Shop, Boxes, ScriptedEngine]:
    env, boxes = env or Shop(), boxes or Boxes()
    engine = ScriptedEngine(plan, log.on_step if log else None)
    scaffold = settings.pop("scaffold", None) or envs.scaffolds.load("tools")
    return Worker(env, scaffold, engine, CHAT, boxes, None, log, config(**settings)), env, boxes, engine


def recovery(folder: Path) -> Recovery:
    log = TokenLog(folder)
    log.close()
    return log.recovery


def flat(turns: tuple[Turn, ...]) -> list[int]:
    return [token for turn in turns for token in (*turn.prompt_ids, *turn.completion_ids)]
