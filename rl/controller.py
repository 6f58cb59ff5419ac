"""The loop that trains, as the hops of one sample: task, dispatch, rollout, group, batch, step, publish.

Sampling and training overlap: while the learner takes a step, the generator goes on with the groups that the
staleness bound allows; synchronous training is the same code with a bound of 0. Everything that must survive
a kill is in the token log or in a checkpoint taken between two steps, when no batch is half consumed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.types import Group, Missing, Task, Trajectory, TrajectoryKey
from model.engine.sampler import SamplingParams
from rl.rates import Rates
from rl.rollout.assignment import Assignment, Purpose
from rl.rollout.buffer import Batch, Buffer
from rl.rollout.dispatch import Dispatcher, Ending, SampleId
from rl.rollout.mixture import MixedStream
from rl.watch.metrics import batch_metrics
from rl.watch.watch import Watch

_COLLECT_S = 0.25


class TaskOrderError(ValueError):
    """A resumed run would give another task to a group than it had."""


class Learner(Protocol):
    """The trainer's process as the controller sees it."""

    async def step(self, batch: Batch) -> dict[str, float]:
        """Takes one optimiser step and returns its metrics."""
        ...

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint of its own state and the controller's at one frontier."""
        ...


class Generator(Protocol):
    """The rollout process as the controller sees it."""

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """Starts samples."""
        ...

    async def collect(self, max_wait_s: float) -> list[Trajectory]:
        """Returns finished samples, waiting at most so long for the first."""
        ...

    async def consumed(self, keys: Sequence[TrajectoryKey]) -> None:
        """Lets the token log forget samples that a durable checkpoint has used up."""
        ...

    async def stats(self) -> dict[str, float]:
        """Returns counters since start."""
        ...

    async def alarms(self) -> list[str]:
        """Returns what held the event loop up lately, in words."""
        ...


Look = Callable[[], Awaitable[None]]
"""Is called in every round of the loop, before samples start."""

Publisher = Callable[[], Awaitable[dict[str, float]]]
"""Publishes the learner's current weights to every generator and returns metrics of the transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one reinforcement stage is to do. `run_seed` seeds every draw of the run."""

    steps: int
    group_size: int
    scaffold: str
    sampling: SamplingParams
    run_seed: int
    checkpoint_every: int


@dataclass(slots=True)
class Controller:
    """Drives one reinforcement stage; `run` returns when `plan.steps` optimiser steps are done."""

    plan: Plan
    learner: Learner
    generator: Generator
    publish: Publisher
    dispatcher: Dispatcher
    buffer: Buffer
    stream: MixedStream
    watch: Watch
    extra_state: dict[str, Any] = field(default_factory=dict)
    first_step: int = 0
    look: Look | None = None
    rates: Rates = field(default_factory=Rates)
    _drawn: dict[int, tuple[Task, int]] = field(default_factory=dict)
    _before: dict[int, tuple[str, int]] = field(default_factory=dict)
    _used: list[TrajectoryKey] = field(default_factory=list)

    @property
    def version(self) -> int:
        """The number of optimiser steps taken: the version of the published weights."""
        return self.dispatcher.version

    async def run(self) -> None:
        """Samples and trains until the steps are done. An error of either side ends it."""
        update: asyncio.Task[None] | None = None
        try:
            while self.version < self.plan.steps:
                await self._dispatch()
                self.receive(await self.generator.collect(_COLLECT_S))
                if update is not None and update.done():
                    update = await update
                if update is None and (batch := self._next_batch()) is not None:
                    update = asyncio.create_task(self._update(batch))
            if update is not None:
                await update  # the last step counts before it is on record and in a checkpoint
        finally:
            if update is not None:
                update.cancel()
                await asyncio.gather(update, return_exceptions=True)

    def _next_batch(self) -> Batch | None:
        """Returns what the next step trains on; None when it waits for samples, or was the last step."""
        return self.buffer.take(self.version) if self.version < self.plan.steps else None

    async def _dispatch(self) -> None:
        if self.look is not None:
            await self.look()
        if self.version >= self.plan.steps:
            return  # the last step ended meanwhile: what began now would train nothing
        for drop in self.buffer.take_dropped():
            self.dispatcher.drop(drop.id, drop.reason)
            self._forget(drop.group)
        started = self.dispatcher.start(time.monotonic())
        for text in self.dispatcher.take_news():
            self.watch.note(text)
        if started:
            await self.generator.submit([self.assignment(sample) for sample in started])

    def assignment(self, sample: SampleId) -> Assignment:
        """Returns what a worker is told about one sample, and announces its group to the buffer."""
        task, effort = self.announce(sample.group)
        key = TrajectoryKey(task.id, effort, self.plan.scaffold, sample.group, sample.index, sample.attempt)
        return Assignment(
            key=key,
            task=task,
            environment=self.stream.environment(sample.group),
            sampling=self.plan.sampling,
            seed=self.plan.run_seed,
            purpose=Purpose.TRAIN,
        )

    def announce(self, group: int) -> tuple[Task, int]:
        """Tells the buffer to expect a group, and returns its task and effort."""
        if group not in self._drawn:
            task, effort = self._drawn[group] = self.stream.draw(group)
            before = self._before.pop(group, (task.id, effort))
            if before != (task.id, effort):
                raise TaskOrderError(
                    f"group {group} had task {before[0]} at effort {before[1]} when it was dispatched, now "
                    f"{task.id} at {effort}: the environment's tasks changed; start a new run with them"
                )
            self.watch.dispatched(group, task.id, effort)
        task, effort = self._drawn[group]
        self.buffer.open(group, task, effort, self.plan.scaffold, self.plan.group_size)
        return task, effort

    def receive(self, trajectories: Iterable[Trajectory]) -> None:
        """Books finished samples: a failed one is run again under its budget, every other joins its group."""
        for trajectory in trajectories:
            key, failure = trajectory.key, ""
            if trajectory.error is not None or isinstance(trajectory.score, Missing):
                failure = _failure(trajectory)
                self.watch.sample_failed(trajectory)
            ending = self.dispatcher.finish(
                SampleId(key.group, key.index, key.attempt), failure, time.monotonic()
            )
            if ending is Ending.FINAL:
                self.buffer.add(trajectory)
            elif ending is Ending.RETRY:
                self._used.append(key)  # the next attempt is what a resumed run asks for

    async def _update(self, batch: Batch) -> None:
        started = time.monotonic()
        metrics = await self.learner.step(batch)
        train_s = time.monotonic() - started
        metrics |= {f"sys/{name}": value for name, value in (await self.publish()).items()}
        self.dispatcher.trained(group.id for group in batch.groups)
        self.dispatcher.advance(batch.version + 1)
        for group in batch.groups:
            self._forget(group)
        counters = await self.generator.stats()
        metrics |= counters | self.rates.update(counters, train_s, metrics.get("train/tokens", 0.0))
        metrics |= self._queue_metrics()
        self.watch.step(self.version, batch, metrics | batch_metrics(batch))
        for text in await self.generator.alarms():
            self.watch.note(text)
        if self.version % self.plan.checkpoint_every == 0 or self.version == self.plan.steps:
            await self.checkpoint()

    def _forget(self, group: Group) -> None:
        self._drawn.pop(group.id, None)
        self.stream.observe(group)
        self._used += [t.key for t in group.trajectories]

    def _queue_metrics(self) -> dict[str, float]:
        """What waits, what filters took since the run began, and samples in flight of each environment."""
        filtered = {
            f"rollout/all/filter.{name}": float(count)
            for name, count in self.buffer.counts.items()
            if name.startswith("dropped.") or name == "filter_exhausted"
        }
        running = {
            f"sys/running.{name}": float(self.dispatcher.running_in(name))
            for name in self.stream.environments
        }
        return {"sys/queue.depth": float(len(self.buffer)), **filtered, **running}

    async def checkpoint(self) -> None:
        """Makes the current frontier durable, then lets the token log forget what lies before it."""
        state, used = self.state_dict(), self._used
        self._used = []
        await asyncio.to_thread(self.watch.sync)
        await self.learner.save(self.first_step + self.version, state)
        await self.generator.consumed(used)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything of the loop that a resumed run needs, as JSON values."""
        tasks = {str(group): [task.id, effort] for group, (task, effort) in self._drawn.items()}
        return {
            "tasks": tasks,
            "dispatcher": self.dispatcher.state_dict(),
            "buffer": self.buffer.state_dict(),
            "stream": self.stream.state_dict(),
            "extra": dict(self.extra_state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self._before = {
            int(group): (task, effort) for group, (task, effort) in state.get("tasks", {}).items()
        }
        self.dispatcher.load_state_dict(state["dispatcher"])
        self.buffer.load_state_dict(state["buffer"])
        self.stream.load_state_dict(state["stream"])
        self.extra_state = dict(state["extra"])


def _failure(trajectory: Trajectory) -> str:
    if trajectory.error is not None:
        return f"{trajectory.error.boundary}.{trajectory.error.type}"
    assert isinstance(trajectory.score, Missing)
    return f"{trajectory.score.boundary}.missing"
