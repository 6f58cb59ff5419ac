"""Training and generation in one process on the same weights: they take turns, and training goes first.

When a batch is ready, training preempts the rollouts at a token boundary; tools that run meanwhile run on.
The engine's policy shares its tensors with the trainer's, so an update moves no bytes: the engine only learns
the new version, before it goes on. It goes on whatever becomes of the step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from envs.types import Trajectory
from model.policies import AnyPolicy
from rl import build
from rl.checkpoint import Checkpoint
from rl.engines.native import NativeEngine
from rl.launch.config import RunConfig
from rl.rollout.buffer import Batch
from rl.rollout.generator import Generator
from rl.trainers.distiller import Lesson
from rl.trainers.learner import Learner

T = TypeVar("T")


class Colocated:
    """A learner and a generator on one device: has the methods of both, and `publish`.

    Args:
        learner: Owns the weights.
        generator: Its engine samples with a policy of the same tensors (`share_tensors`).
        engine: That engine.
    """

    def __init__(self, learner: Learner, generator: Generator, engine: NativeEngine) -> None:
        self._learner, self._generator, self._engine = learner, generator, engine
        self._turns = asyncio.Lock()
        self._held_up_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    async def warm_start(self, steps: int) -> dict[str, float]:
        """Takes steps of SFT, before any rollout."""
        return await self._preempting(lambda: self._learner.warm_start(steps))

    async def begin_learning(self) -> None:
        """Switches to RL or distillation."""
        await self._preempting(self._learner.begin_learning)

    async def step(self, batch: Batch) -> dict[str, float]:
        """Takes one optimiser step while the rollouts rest; they go on under the new version."""
        return await self._preempting(lambda: self._learner.step(batch))

    async def distil(
        self,
        batch: Batch,
        lessons: Sequence[Lesson],
        folders: Mapping[str, str],
        weights: Mapping[str, float],
    ) -> dict[str, float]:
        """Takes one step of distillation while the rollouts rest."""
        return await self._preempting(lambda: self._learner.distil(batch, lessons, folders, weights))

    async def mismatch(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Compares the sampler's log-probabilities with the trainer's on equal weights."""
        return await self._preempting(lambda: self._learner.mismatch(trajectories))

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint; the engine samples on, for weights do not change."""
        async with self._turns:
            await asyncio.to_thread(self._learner.save, step, state)

    async def restore(self, checkpoint: Checkpoint) -> Any:
        """Restores a checkpoint and returns the controller's part of it."""
        return await self._preempting(lambda: self._learner.restore(checkpoint))

    async def recovered(self, groups: int) -> None:
        """Notes that groups below this number began in an earlier attempt."""
        self._learner.recovered(groups)

    async def publish(self) -> dict[str, float]:
        """Returns what the last change of the weights took: they are in place already."""
        return {
            "weight_sync_s": 0.0,
            "weights.transfer_s": 0.0,
            "weights.pause_s": self._engine.stats()["pause_seconds"],
            "weights.held_up_s": self._held_up_s,
            "weights.bytes": 0.0,
            "weights.gb_per_s": 0.0,
        }

    async def _preempting(self, work: Callable[[], T]) -> T:
        """Does work on the device while the engine rests, and says what version the weights are after it."""
        async with self._turns:
            started = time.monotonic()
            await self._engine.pause()
            working = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(working)
            finally:
                if not working.done():  # cancelled: a thread cannot be, and weights still change
                    await asyncio.wait([working])
                await self._go_on(started)

    async def _go_on(self, started: float) -> None:
        _, version = self._learner.weights()
        try:
            if version != self._engine.version:
                await self._engine.set_version(version)
        finally:
            await self._engine.resume()
            self._held_up_s = time.monotonic() - started


def share_tensors(policy: AnyPolicy, owner: AnyPolicy) -> None:
    """Makes the weights of `policy` those of `owner`, the same memory; their switches stay their own."""
    policy.load_state_dict(owner.state_dict(), strict=True, assign=True)


@asynccontextmanager
async def open_colocated(
    config: RunConfig, checkpoints: Path, token_log: Path, fleet_state: Path, owner: str
) -> AsyncIterator[Colocated]:
    """Opens a process that trains and generates in turns."""
    learner = Learner(config, checkpoints)
    net = build.policy(config).to(config.engine_device)
    share_tensors(net, learner.policy)
    async with build.open_generator(config, token_log, fleet_state, owner, net) as generator:
        engine = generator.engine
        assert isinstance(engine, NativeEngine)
        yield Colocated(learner, generator, engine)
