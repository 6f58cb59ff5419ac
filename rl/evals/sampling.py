"""Draws the samples of an evaluation with the parts of training: engine, worker, scaffold, sandbox, reward.

The weights are loaded once and never swapped, and each sample's tokens are checked to be of that version.
Cells run one after the other, so that the engine's busy seconds belong to one of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import rewards
from envs import scaffolds
from envs.base import Environment
from envs.types import Missing, Trajectory, TrajectoryKey
from model.chat import ChatFormat, load_chat
from model.engine.sampler import SamplingParams
from model.policies import open_policy
from rewards import unit_tests
from rl import build
from rl.crew import fleet_state
from rl.engines.base import Engine
from rl.engines.native import NativeEngine
from rl.engines.vllm import VllmEngine
from rl.engines.vllm_installed import check_installed
from rl.engines.vllm_model import ModelFolder
from rl.evals.plan import EvalPlan, Planned
from rl.evals.rows import Cell, Row, RowLog, row_of
from rl.evals.settings import EvalSettings
from rl.rollout.assignment import Assignment, Purpose
from rl.rollout.config import RolloutConfig
from rl.rollout.pool import RolloutLoop
from rl.rollout.sandboxes import FleetSandboxes, lasting
from rl.rollout.worker import Worker
from sandbox.client import Fleet

_COLLECT_S = 0.5
_STOP_S = 10.0


class EngineLostError(RuntimeError):
    """The engine died; samples that have a score are kept, the others are drawn when it goes on."""


Progress = Callable[[Cell, int, int], None]
"""Is told the cell that is sampled, and how many samples of the whole evaluation are done of how many."""


@dataclass(slots=True)
class Sampler:
    """Runs cells; the parts are owned by whoever opened it."""

    settings: EvalSettings
    version: int
    engine: Engine
    chat: ChatFormat
    fleet: Fleet | None
    log: RowLog
    progress: Progress
    _loop: RolloutLoop[Trajectory] = field(default_factory=RolloutLoop)
    _waiting: list[Assignment] = field(default_factory=list)
    _busy: float = 0.0

    async def run(self, plan: EvalPlan) -> None:
        """Draws every sample that the log does not have yet; when cancelled, the log keeps what is there.

        Raises:
            EngineLostError: The engine died.
        """
        try:
            for planned in plan.cells:
                await self._cell(planned, plan.samples)
        finally:
            await self._loop.cancel(_STOP_S)

    async def _cell(self, planned: Planned, total: int) -> None:
        worker, own = self._worker(planned), _owns_sandbox(planned.env)
        self._waiting = self._missing(planned)
        left, self._busy = len(self._waiting), self.engine.stats()["busy_seconds"]
        while left:
            self._start(worker)
            ended = await self._loop.collect(_COLLECT_S)
            lost = not self.engine.stats()["healthy"]
            if lost:  # what has no score may lack it because of that
                ended = [t for t in ended if not isinstance(t.score, Missing)]
            final = [t for t in ended if not self._again(t, planned)]
            left -= len(final)
            rows = [row_of(t, planned.cell, self.version, own_sandbox=own) for t in final]
            self._write(rows, planned.cell)
            self.progress(planned.cell, self._done(), total)
            if lost and left:
                raise EngineLostError(
                    f"the engine died with {left} samples of {planned.cell} to go; what has a score is kept: "
                    f"`temper eval {self.log.path.parent}` goes on with the rest"
                )

    def _missing(self, planned: Planned) -> list[Assignment]:
        """Assignments of the cell's samples without a score, those of an earlier attempt one attempt on."""
        found = self.log.found.rows
        out: list[Assignment] = []
        for task in range(len(planned.tasks)):
            for sample in range(self.settings.k):
                row = found.get((planned.cell, task, sample))
                if row is None or row.score is None:
                    out.append(self._assignment(planned, task, sample, row.attempt + 1 if row else 0))
        return out

    def _assignment(self, planned: Planned, task: int, sample: int, attempt: int) -> Assignment:
        settings, cell = self.settings, planned.cell
        key = TrajectoryKey(planned.tasks[task].id, cell.effort, cell.scaffold, task, sample, attempt)
        sampling = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_completion_tokens,
        )
        return Assignment(
            key=key,
            task=planned.tasks[task],
            environment=planned.env.name,
            sampling=sampling,
            seed=settings.seed,
            purpose=Purpose.EVAL,
        )

    def _start(self, worker: Worker) -> None:
        while self._waiting and self._loop.running < self.settings.max_in_flight:
            assignment = self._waiting.pop(0)
            self._loop.run(assignment.session, lambda assignment=assignment: worker.run(assignment))

    def _again(self, trajectory: Trajectory, planned: Planned) -> bool:
        """Sends a sample without a score back into the queue while it has retries left."""
        key = trajectory.key
        before = self.log.found.rows.get((planned.cell, key.group, key.index))
        first = before.attempt + 1 if before else 0
        if not isinstance(trajectory.score, Missing) or key.attempt - first >= self.settings.retries:
            return False
        self._waiting.append(self._assignment(planned, key.group, key.index, key.attempt + 1))
        return True

    def _write(self, rows: list[Row], cell: Cell) -> None:
        busy = self.engine.stats()["busy_seconds"]
        used, self._busy = busy - self._busy, busy
        if rows or used:
            self.log.write(rows, cell, used)

    def _done(self) -> int:
        return len(self.log.found.rows)

    def _worker(self, planned: Planned) -> Worker:
        settings, env = self.settings, planned.env
        limits = RolloutConfig(max_total_tokens=settings.max_tokens, deadline_s=settings.deadline_s)
        sandboxes = None
        if env.sandbox is not None:
            assert self.fleet is not None
            lease_s = limits.deadline_s + limits.score_deadline_s + 60.0
            sandboxes = FleetSandboxes(lasting(self.fleet), env.sandbox, limits.pool_size, lease_s)
        reward = rewards.load(env.reward_name) if env.reward_name else None
        scaffold = scaffolds.load(planned.cell.scaffold)
        return Worker(
            env,
            scaffold,
            self.engine,
            self.chat,
            sandboxes,
            reward,
            None,
            limits,
            max_turns=settings.max_turns,
        )


def _owns_sandbox(env: Environment) -> bool:
    return env.sandbox is not None and not (env.tools and all(tool.stateless for tool in env.tools))


@asynccontextmanager
async def open_sampler(
    plan: EvalPlan, policy_folder: Path, log: RowLog, progress: Progress, owner: Path
) -> AsyncIterator[Sampler]:
    """Loads the policy into an engine of its own and connects the fleet, if an environment needs it.

    Raises:
        CheckpointError: The policy cannot be read.
        SandboxError: No sandbox is to be had.
    """
    settings = plan.settings
    build.use_threads(settings.threads)
    chat = load_chat(policy_folder)
    version = plan.cells[0].identity.step
    async with AsyncExitStack() as stack:
        engine = await _open_engine(settings, policy_folder, version)
        stack.push_async_callback(engine.close)
        fleet = None
        if any(p.env.sandbox is not None or p.env.reward_name == "unit_tests" for p in plan.cells):
            fleet = await Fleet.connect(
                settings.sandbox_url, state_dir=fleet_state(), owner=str(owner), backend=settings.sandbox
            )
            stack.push_async_callback(fleet.close)
            unit_tests.judge_in(fleet)
        yield Sampler(settings, version, engine, chat, fleet, log, progress)


def check_engine(settings: EvalSettings, policy_folder: Path) -> None:
    """Returns when the engine is there and takes this policy, as far as can be told without starting it.

    Raises:
        EngineStartError: vLLM is not installed, or another release.
        ModelFolderError: vLLM does not serve this policy, or not with so many tokens.
    """
    if settings.engine == "vllm":
        ModelFolder.read(policy_folder).check_context(settings.max_tokens)
        check_installed()


async def _open_engine(settings: EvalSettings, policy_folder: Path, version: int) -> Engine:
    if settings.engine == "vllm":
        return await VllmEngine.start(
            policy_folder,
            settings.vllm,
            threads=settings.threads,
            version=version,
            max_requests=settings.max_in_flight,
            max_tokens=settings.max_tokens,
        )
    policy = open_policy(policy_folder)
    policy.fake_quant, policy.exact = settings.fake_quant, settings.exact
    return NativeEngine(
        policy,
        max_requests=settings.max_in_flight,
        max_tokens=settings.max_tokens,
        version=version,
        storage=settings.storage,
        replay=settings.replay,
    )
