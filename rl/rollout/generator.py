"""The rollout process as one plain object: engine, workers, token log and sandboxes behind batched calls.

Its methods are what a controller calls across processes, so they take and return batches: no call is made
for a turn, let alone a token. It knows nothing of groups or training.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from envs.types import Trajectory, TrajectoryKey
from model.diagnostics.scales import ScaleMonitor
from rl.engines.base import Engine
from rl.rollout.assignment import Assignment
from rl.rollout.config import RolloutConfig
from rl.rollout.lag import LagMonitor
from rl.rollout.pool import RolloutLoop
from rl.rollout.resume import Recovered
from rl.rollout.sandboxes import Sandboxes
from rl.rollout.state import LoggedSample
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from rl.transports import Inbox
from rl.weights import WeightSnapshot


class GeneratorError(ValueError):
    """An assignment that no worker here can run, or a sample that the log does not hold."""


class Generator:
    """Runs assignments until they are trajectories.

    Args:
        workers: By (environment, scaffold).
        engine: The workers' engine, whose step listener is `log.on_step`.
        log: The token log, just opened; its recovery is offered by `recover`.
        config: Settings.
        scales: Counts block scales in the engine's passes, for `stats`; None: nobody counts.
    """

    def __init__(
        self,
        workers: Mapping[tuple[str, str], Worker],
        engine: Engine,
        log: TokenLog,
        config: RolloutConfig,
        scales: ScaleMonitor | None = None,
    ) -> None:
        self._workers, self._engine, self._log = dict(workers), engine, log
        self._scales = scales
        self._loop: RolloutLoop[Trajectory] = RolloutLoop()
        self._recovered: dict[TrajectoryKey, LoggedSample] = {
            sample.assignment.key: sample for sample in log.recovery.unfinished.values()
        }
        self._lag = LagMonitor(config.lag_alarm_s)
        self._lag_started = False
        self._compacting = asyncio.Lock()
        self.inbox = Inbox(engine)
        self.persist: Callable[[], Awaitable[int]] | None = None
        """Called by `stop` while the engine is paused: keeps running turns' caches for a successor."""

    @property
    def engine(self) -> Engine:
        """The engine that all samples use."""
        return self._engine

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """Starts samples.

        Raises:
            GeneratorError: No worker for an assignment's environment and scaffold.
        """
        self._watch_lag()
        for assignment in assignments:
            self._start(assignment, None)

    async def recover(self, version: int) -> Recovered:
        """Returns what the log of an earlier process holds: results to collect and samples to go on with.

        Tokens of policies newer than `version`, which the checkpoint does not have, count as of `version`.
        """
        found = self._log.recovery
        finished = tuple(_up_to_version(trajectory, version) for trajectory in found.finished.values())
        for key, sample in self._recovered.items():
            self._recovered[key] = sample.up_to_version(version)
        return Recovered(finished, tuple(self._recovered), found.lost_tokens, found.damage)

    async def resubmit(self, keys: Sequence[TrajectoryKey]) -> None:
        """Goes on with recovered samples, each at the token where its log ends.

        Raises:
            GeneratorError: The log has no unfinished sample of such a key.
        """
        self._watch_lag()
        for key in keys:
            sample = self._recovered.pop(key, None)
            if sample is None:
                raise GeneratorError(
                    f"the token log has no unfinished sample {key}: take keys from recover(), each once"
                )
            self._start(sample.assignment, sample)

    async def collect(self, max_wait_s: float) -> list[Trajectory]:
        """Returns finished samples, waiting at most `max_wait_s` for the first."""
        return await self._loop.collect(max_wait_s)

    async def load_weights(self, snapshot: WeightSnapshot) -> None:
        """Swaps the weights between two tokens; running samples go on under the new version.

        Raises:
            WeightsError: The snapshot is damaged; the old weights stay.
        """
        await self._engine.load_weights(snapshot.tensors(), snapshot.version)

    async def consumed(self, keys: Sequence[TrajectoryKey]) -> None:
        """Lets the log forget samples; call it when a checkpoint that has used them is durable."""
        for key in keys:
            await self._forget(self._recovered.pop(key, None))
        self._log.consumed(keys)
        async with self._compacting:
            if self._log.wants_compaction:
                await asyncio.to_thread(self._log.compact)

    async def stop(self, deadline_s: float = 10.0) -> int:
        """Stops all samples at a token boundary, flushes the log and returns every sandbox.

        Samples stay in the log, to be continued by the next process. Returns how many were interrupted.

        Raises:
            TimeoutError: Some samples' clean-up did not end within `deadline_s`; the log is flushed.
        """
        running = self._loop.running
        await self._engine.pause()
        try:
            await asyncio.to_thread(self._log.flush)
            if self.persist is not None:
                await self.persist()
            late = await self._loop.cancel(deadline_s)
        finally:
            await self._engine.resume()
        if late:
            raise TimeoutError(
                f"{late} of {running} samples did not give back their sandbox in {deadline_s:g} s"
            )
        return running

    async def interrupt(self) -> list[Trajectory]:
        """Stops like `stop` and returns the samples that had finished by then; the generator stays usable."""
        await self.stop()
        for sandboxes in self._sandboxes():
            await sandboxes.park()
        return await self._loop.collect(0.0)

    async def close(self, deadline_s: float = 10.0) -> None:
        """Stops, then closes engine and log. Sandboxes' fleet stays its owner's to close."""
        try:
            await self.stop(deadline_s)
        finally:
            await self._lag.stop()
            await self._engine.close()
            self._log.close()

    async def stats(self) -> dict[str, float]:
        """Counters since start: `sys/engine.*`, `sys/wal.*`, `sys/loop_lag.*`, `sys/sandbox.*`, samples.

        Shares of block scales at their limits, `quant/rollout/*`, are since the last call.
        """
        engine = {f"sys/engine.{name}": value for name, value in self._engine.stats().items()}
        log = {f"sys/wal.{name}": value for name, value in self._log.stats().items()}
        lag = {f"sys/{name}": value for name, value in self._lag.stats().items()}
        samples = {
            "sys/rollout.running": float(self._loop.running),
            "sys/rollout.interrupted": float(self._loop.interrupted),
        }
        counts = sum((part.counts for part in self._sandboxes()), Counter[str]())
        boxes = {f"sys/sandbox.{name}": float(count) for name, count in counts.items()}
        scales = {} if self._scales is None else self._scales.metrics("rollout")
        return engine | log | lag | samples | boxes | scales

    def _sandboxes(self) -> list[Sandboxes]:
        return [worker.sandboxes for worker in self._workers.values() if worker.sandboxes is not None]

    async def alarms(self) -> list[str]:
        """What held the event loop up lately, in words that name the environment."""
        return [
            f"environment {b.environment or 'none'} blocked the event loop for {b.seconds:.1f} s "
            f"at {b.where}: make it await, or call it in a thread"
            for b in self._lag.blocked
        ]

    async def _forget(self, sample: LoggedSample | None) -> None:
        if sample is not None and sample.place is not None:
            for sandboxes in self._sandboxes():
                await sandboxes.discard(sample.place)

    def _start(self, assignment: Assignment, recovered: LoggedSample | None) -> None:
        name = (assignment.environment, assignment.key.scaffold)
        worker = self._workers.get(name)
        if worker is None:
            known = ", ".join(f"{env} with {scaffold}" for env, scaffold in sorted(self._workers))
            raise GeneratorError(
                f"no worker for environment {name[0]} with scaffold {name[1]}; there are: {known}"
            )
        self._loop.run(assignment.session, lambda: worker.run(assignment, recovered))

    def _watch_lag(self) -> None:
        if not self._lag_started:
            self._lag_started = True
            self._lag.start()


def _up_to_version(trajectory: Trajectory, version: int) -> Trajectory:
    if all(v <= version for v in trajectory.policy_versions):
        return trajectory
    return replace(
        trajectory,
        branches=tuple(
            tuple(
                replace(turn, policy_versions=tuple(min(v, version) for v in turn.policy_versions))
                for turn in branch
            )
            for branch in trajectory.branches
        ),
    )
