"""Runs one sample from its assignment to its scored trajectory; whatever fails, a trajectory comes out.

A fault of the infrastructure gives a FAILED trajectory without a score, which the dispatcher runs again
under its budget; it is never a zero. A limit gives a truncated trajectory, which is judged like any other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from envs.base import Environment, Scaffold
from envs.types import (
    Boundary,
    ErrorInfo,
    Missing,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
)
from model.chat import ChatFormat
from rl.engines.base import Engine
from rl.rollout.assignment import Assignment, Purpose
from rl.rollout.config import RolloutConfig, RolloutConfigError
from rl.rollout.episode import Door, EpisodeRun, Surroundings
from rl.rollout.faults import EpisodeEnded, Fault, Interrupted, boundary
from rl.rollout.latency import Delays
from rl.rollout.sandboxes import Sandboxes, stateless
from rl.rollout.state import LoggedSample
from rl.rollout.wal import TokenLog

Reward = Callable[[Task, Trajectory], Awaitable[Score | Missing]]

_STATUS = {
    StopReason.ANSWER: Status.FINISHED,
    StopReason.PARSE_ERROR: Status.FINISHED,
    StopReason.MAX_TOKENS: Status.TRUNCATED,
    StopReason.MAX_TURNS: Status.TRUNCATED,
    StopReason.ERROR: Status.FAILED,
    StopReason.ABORTED: Status.FAILED,
}


class Worker:
    """Runs samples of one environment with one scaffold, any number at a time, in one event loop.

    Args:
        env: The environment.
        scaffold: Drives each episode.
        engine: Samples tokens; its step listener must be `log.on_step`.
        chat: The checkpoint's chat format.
        sandboxes: Where tool calls run; None only for an environment that needs no sandbox.
        reward: Judges a trajectory; None takes the environment's own `score`.
        log: The token log of this process; None logs nothing.
        config: Limits.
        max_turns: Overrides the environment's.
        delays: What every tool call waits for on top; None adds nothing.
        door: Opens the model to agent programs (scaffold=external).

    Raises:
        RolloutConfigError: The environment needs a sandbox and there is none.
    """

    def __init__(
        self,
        env: Environment,
        scaffold: Scaffold,
        engine: Engine,
        chat: ChatFormat,
        sandboxes: Sandboxes | None,
        reward: Reward | None,
        log: TokenLog | None,
        config: RolloutConfig,
        *,
        max_turns: int | None = None,
        delays: Delays | None = None,
        door: Door | None = None,
    ) -> None:
        if env.sandbox is not None and sandboxes is None:
            raise RolloutConfigError(
                f"environment {env.name!r} runs its tools in a sandbox, and this worker was given none; "
                "connect a fleet (sandbox=docker or sandbox=bubblewrap)"
            )
        if scaffold.name == "external" and getattr(env, "agent", None) is None:
            raise RolloutConfigError(
                f"scaffold=external runs an environment's agent program, and {env.name!r} has none: decorate "
                "an async function of (task, access) with `@NAME.agent`, or choose another scaffold"
            )
        self.env, self.scaffold = env, scaffold
        self._engine, self._log, self._config = engine, log, config
        self._reward: Reward = reward if reward is not None else env.score
        self.sandboxes = needed = sandboxes if env.sandbox is not None else None
        turns = max_turns or env.max_turns
        self._logged = Surroundings(
            env, engine, chat, needed, log, turns, config.max_total_tokens, delays, door
        )
        self._unlogged = replace(self._logged, log=None)

    async def run(self, assignment: Assignment, recovered: LoggedSample | None = None) -> Trajectory:
        """Runs one sample to its end; with `recovered`, goes on where the log of an earlier process ends.

        Raises:
            Interrupted: The engine closes; the sample stays in the log, to be continued.
            TokenLogError: The log cannot be written.
        """
        started = time.monotonic()
        log = self._log if assignment.purpose is Purpose.TRAIN else None
        around = self._logged if log is not None else self._unlogged
        episode = EpisodeRun(around, assignment, recovered.turns if recovered else ())
        if log is not None:
            log.resume(recovered) if recovered else log.start(assignment)
        try:
            stop, error = await self._within_deadline(episode, recovered)
        finally:
            await self._release(assignment.session)
        trajectory = await self._judged(episode, assignment, stop, error, started)
        if log is not None:
            log.end(assignment.session, trajectory)
        return trajectory

    async def _release(self, session: str) -> None:
        # A release that fails belongs to an engine that is gone; the cause is in the sample's own fault.
        with suppress(Fault), boundary(Boundary.ENGINE):
            await asyncio.shield(self._engine.release(session))

    async def _within_deadline(
        self, episode: EpisodeRun, recovered: LoggedSample | None
    ) -> tuple[StopReason, ErrorInfo | None]:
        try:
            async with asyncio.timeout(self._config.deadline_s) as limit:
                stop = await self._play(episode, recovered, limit)
        except Fault as fault:
            return StopReason.ERROR, fault.info
        except TimeoutError:
            message = f"the sample took longer than rollout.deadline_s={self._config.deadline_s:g} s"
            return StopReason.ERROR, ErrorInfo(episode.busy_with, "DeadlineExceeded", message)
        if stop is StopReason.ERROR:
            return stop, ErrorInfo(Boundary.SCAFFOLD, "StopReason", "the scaffold gave up with an error")
        return stop, None

    async def _play(
        self, episode: EpisodeRun, recovered: LoggedSample | None, limit: asyncio.Timeout
    ) -> StopReason:
        if self.sandboxes is None or stateless(self.env):
            return await self._drive(episode)
        place, logged = recovered and recovered.place, episode.logged
        with boundary(Boundary.SANDBOX):
            async with self.sandboxes.own(episode.session, place, lasting=logged) as own:
                episode.work.own = own
                try:
                    return await self._in_own_sandbox(episode, recovered)
                except (asyncio.CancelledError, Interrupted):
                    own.keep = logged and not limit.expired()  # for whoever goes on with the sample
                    raise
                finally:
                    if not own.keep:
                        await self._cleanup(episode)

    async def _in_own_sandbox(self, episode: EpisodeRun, recovered: LoggedSample | None) -> StopReason:
        """Plays the episode; the sandbox of a recovered one is needed only by the first call not logged.

        An agent program has it from its start, and is run again from there: the log answers its requests.
        """
        program = self.scaffold.name == "external"
        if recovered is None or program:
            with boundary(Boundary.ENVIRONMENT):
                await episode.work.prepare(anew=recovered is not None and recovered.place is not None)
        return await self._drive(episode)

    async def _drive(self, episode: EpisodeRun) -> StopReason:
        try:
            with boundary(Boundary.SCAFFOLD):
                stop = await self.scaffold.run(episode)
        except EpisodeEnded as ended:
            stop = ended.stop
        except Fault:  # of an agent program, perhaps only because it was told of the episode's end
            if not (episode.ended or episode.fault or episode.interruption):
                raise
            stop = StopReason.ERROR
        if cause := episode.fault or episode.interruption:
            raise cause
        return episode.ended or stop

    async def _cleanup(self, episode: EpisodeRun) -> None:
        if (box := episode.work.box) is not None:
            with boundary(Boundary.ENVIRONMENT):
                await self.env.cleanup(episode.task, box)

    async def _judged(
        self,
        episode: EpisodeRun,
        assignment: Assignment,
        stop: StopReason,
        error: ErrorInfo | None,
        started: float,
    ) -> Trajectory:
        played = time.monotonic()
        unscored = Missing(error.message, error.boundary) if error else Missing("not judged yet")
        branches = episode.history.record()
        trajectory = Trajectory(assignment.key, branches, _STATUS[stop], stop, unscored, error)
        score = unscored if error else await self._score(assignment.task, trajectory)
        ended = time.monotonic()
        timings = {**episode.timings, "score_s": ended - played, "total_s": ended - started}
        return Trajectory(assignment.key, branches, _STATUS[stop], stop, score, error, timings)

    async def _score(self, task: Task, trajectory: Trajectory) -> Score | Missing:
        limit = self._config.score_deadline_s
        try:
            async with asyncio.timeout(limit):
                score = await self._reward(task, trajectory)
        except TimeoutError:
            return Missing(f"the reward took longer than rollout.score_deadline_s={limit:g} s")
        except Exception as error:
            return Missing(f"{type(error).__name__}: {error}")
        if isinstance(score, Score) and not all(map(math.isfinite, (score.value, *score.parts.values()))):
            return Missing(f"the reward is not finite: {score.value} of parts {dict(score.parts)}")
        return score
