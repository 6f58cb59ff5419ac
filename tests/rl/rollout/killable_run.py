"""A small run in a process of its own that may be killed at any moment and goes on in the same folder."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import envs.registry
import envs.scaffolds
import rewards
from model.config import PolicyConfig
from model.policy import Policy
from rl.engines.base import Engine
from rl.engines.native import NativeEngine
from rl.rollout import codec
from rl.rollout.assignment import Assignment
from rl.rollout.buffer import Buffer
from rl.rollout.config import RolloutConfig, WalConfig
from rl.rollout.dispatch import Dispatcher, Ending, GroupPlan, SampleId
from rl.rollout.generator import Generator
from rl.rollout.resume import plan_resume, sample_id
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from tests.rl.rollout.scripted import CHAT, Boxes, ScriptedEngine, calc_assignment, expert

SIZE, PER_STEP = 4, 2


def assignment(sample: SampleId) -> Assignment:
    """The product of a group is a function of its number."""
    return calc_assignment(
        sample.group, sample.index, sample.attempt, a=11 + sample.group, b=97 - sample.group, max_tokens=20
    )


def make_engine(kind: str, log: TokenLog) -> tuple[Engine, dict[str, torch.Tensor]]:
    """Returns the engine and the weights that every "update" publishes again under a new version."""
    if kind == "scripted":
        return ScriptedEngine(expert, log.on_step, step_s=0.004), {}
    torch.set_num_threads(1)
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(1)
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    # As in a run's configuration: a bounded replay after a kill would begin elsewhere than the one before it.
    engine = NativeEngine(policy, max_requests=16, max_tokens=128, on_step=log.on_step, replay="off")
    return engine, weights


class Run:
    """Dispatch, rollouts, batches and checkpoints, without a trainer: a batch is "trained" by keeping it."""

    def __init__(self, folder: Path, kind: str, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.config = RolloutConfig(
            max_in_flight=16,
            groups_per_step=PER_STEP,
            staleness=1,
            max_total_tokens=128,
            wal=WalConfig(segment_bytes=20_000),
        )
        self.dispatcher = Dispatcher(self.config, lambda _: GroupPlan(SIZE, "calc"))
        self.buffer = Buffer(self.config)
        self.trained: list[Any] = []
        self.log = TokenLog(folder / "log", flush_ms=10.0, segment_bytes=self.config.wal.segment_bytes)
        self.engine, self.weights = make_engine(kind, self.log)
        env, scaffold = envs.registry.load("calc"), envs.scaffolds.load("tools")
        worker = Worker(
            env, scaffold, self.engine, CHAT, Boxes(), rewards.load("exact"), self.log, self.config
        )
        self.generator = Generator({("calc", "tools"): worker}, self.engine, self.log, self.config)

    async def play(self) -> None:
        await self.resume()
        while self.dispatcher.version < self.steps:
            started = self.dispatcher.start(time.monotonic())
            for sample in started:
                self.announce(sample.group)
            await self.generator.submit([assignment(sample) for sample in started])
            self.receive(await self.generator.collect(0.2))
            while (batch := self.buffer.take(self.dispatcher.version)) is not None:
                self.trained += [codec.group_to_json(group) for group in batch.groups]
                self.dispatcher.trained(group.id for group in batch.groups)
                self.dispatcher.advance(batch.version + 1)
                await self.engine.load_weights(self.weights, batch.version + 1)
                self.checkpoint()
                await self.generator.consumed([t.key for group in batch.groups for t in group.trajectories])
        await self.generator.close()
        assert self.dispatcher.account().balanced
        assert not self.buffer.take_dropped()
        (self.folder / "done").write_text("")

    async def resume(self) -> None:
        path = self.folder / "checkpoint.json"
        if path.exists():
            state = json.loads(path.read_text())
            self.dispatcher.load_state_dict(state["dispatcher"])
            self.buffer.load_state_dict(state["buffer"])
            self.trained = state["trained"]
        await self.engine.load_weights(self.weights, self.dispatcher.version)
        plan = plan_resume(self.dispatcher, [await self.generator.recover(self.dispatcher.version)])
        for group in plan.groups:
            self.announce(group)
        await self.generator.consumed(plan.forget)
        await self.generator.resubmit(plan.resubmit)
        self.receive(list(plan.receive))

    def announce(self, group: int) -> None:
        known = assignment(SampleId(group, 0))
        self.buffer.open(group, known.task, known.key.effort, known.key.scaffold, SIZE)

    def receive(self, trajectories: list[Any]) -> None:
        for trajectory in trajectories:
            assert trajectory.error is None, trajectory.error
            if self.dispatcher.finish(sample_id(trajectory.key)) is Ending.FINAL:
                self.buffer.add(trajectory)

    def checkpoint(self) -> None:
        state = {
            "dispatcher": self.dispatcher.state_dict(),
            "buffer": self.buffer.state_dict(),
            "trained": self.trained,
        }
        partial = self.folder / "checkpoint.partial"
        partial.write_text(json.dumps(state))
        os.replace(partial, self.folder / "checkpoint.json")


def main(folder: str, kind: str, steps: int) -> None:
    """Runs, or goes on with, the run in `folder` until `steps` batches are trained."""

    async def play() -> None:
        await Run(Path(folder), kind, steps).play()

    asyncio.run(play())
