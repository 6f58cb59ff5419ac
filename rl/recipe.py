"""The stages of one run: imitate, measure, reinforce, measure again; resumable between any two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Protocol

from envs.types import Task, Trajectory, TrajectoryKey
from model.engine.sampler import SamplingParams
from rl import effort_curve
from rl.checkpoint import Checkpoint
from rl.controller import Controller, Generator, Learner, Plan, Publisher
from rl.distil.stage import DistilStream, Student, open_distillation
from rl.environments import group_plan, load_environments, open_stream, shares, sources
from rl.evaluation import EvalResult, summarize
from rl.launch.config import RunConfig
from rl.rollout.assignment import Assignment, Purpose
from rl.rollout.buffer import Buffer
from rl.rollout.dispatch import Dispatcher
from rl.rollout.mixture import MixedStream, interleaved
from rl.rollout.resume import Recovered, plan_resume
from rl.watch.watch import Watch

_SFT_CHUNK = 10
_EVAL_SEED = 7_919


class StagedLearner(Learner, Student, Protocol):
    """A learner that also imitates, distils, restores and compares itself with the sampler."""

    async def warm_start(self, steps: int) -> dict[str, float]:
        """Takes steps of SFT."""
        ...

    async def begin_learning(self) -> None:
        """Switches from imitation to RL or distillation."""
        ...

    async def restore(self, checkpoint: Checkpoint) -> Any:
        """Restores a checkpoint and returns the controller's part of it."""
        ...

    async def recovered(self, groups: int) -> None:
        """Notes that groups numbered below `groups` began in an earlier attempt."""
        ...

    async def mismatch(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Compares log-probabilities with the sampler's on equal weights."""
        ...


class StagedGenerator(Generator, Protocol):
    """A generator that can also recover the samples of a killed run from its token log."""

    async def interrupt(self) -> list[Trajectory]:
        """Stops all samples at a token boundary and returns those that had finished."""
        ...

    async def recover(self, version: int) -> Recovered:
        """Returns what the token log of a killed run holds."""
        ...

    async def resubmit(self, keys: Sequence[TrajectoryKey]) -> None:
        """Continues recovered samples at their next token."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed: evaluations after SFT (`before`) and at the end (`after`), sampled and greedy."""

    before: Mapping[str, EvalResult]
    after: Mapping[str, EvalResult]
    steps: int


@dataclass(slots=True)
class Recipe:
    """One run: its parts, and how far it has come."""

    config: RunConfig
    learner: StagedLearner
    generator: StagedGenerator
    publish: Publisher
    watch: Watch
    folder: Path
    sft_done: int = 0
    results: dict[str, dict[str, float]] = field(default_factory=dict)

    async def run(self, checkpoint: Checkpoint | None) -> Outcome:
        """Runs all stages, from `checkpoint` on when there is one."""
        controller = self._controller()
        if checkpoint is not None:
            await self._restore(controller, checkpoint)
        if checkpoint is None or "before" not in self.results:
            await self._forget_samples()
            await self._imitate(controller)
            await self.learner.begin_learning()
            await self.publish()
            await self._measure("before", version=0)
            controller.extra_state = self._state()
            await controller.checkpoint()
        await controller.run()
        controller.receive(await self.generator.interrupt())
        await self._measure("after", version=controller.version)
        await self._measure_curve(controller.version)
        return Outcome(self._results("before"), self._results("after"), controller.version)

    async def _forget_samples(self) -> None:
        """Forgets samples of a later checkpoint that is damaged or gone: all of them are drawn anew."""
        held = await self.generator.recover(0)
        await self.generator.consumed([*(t.key for t in held.finished), *held.unfinished])

    def _controller(self) -> Controller:
        if not self.config.opd.teachers:
            return self._loop(self.learner, open_stream(self.config))
        distillation = open_distillation(self.config, self.folder, self.learner, self.watch)
        controller = self._loop(distillation, DistilStream(sources(self.config), distillation.versions))
        distillation.dispatcher, controller.look = controller.dispatcher, distillation.look
        return controller

    def _loop(self, learner: Learner, stream: MixedStream) -> Controller:
        config = self.config
        plan = Plan(
            steps=config.learning_steps,
            group_size=config.algorithm.group_size,
            scaffold=config.scaffold.name,
            sampling=self._sampling(config.engine.temperature),
            run_seed=config.run.seed,
            checkpoint_every=config.checkpoint.every,
        )
        return Controller(
            plan,
            learner,
            self.generator,
            self.publish,
            Dispatcher(config.rollout, lambda g: group_plan(config, stream, g), config.env.caps),
            Buffer(config.rollout, length=config.effort.length_penalty),
            stream,
            self.watch,
            first_step=config.sft.steps,
        )

    def _state(self) -> dict[str, Any]:
        return {"sft_done": self.sft_done, "results": self.results}

    async def _imitate(self, controller: Controller) -> None:
        total, every = self.config.sft.steps, self.config.checkpoint.sft_every
        while self.sft_done < total:
            metrics = await self.learner.warm_start(min(_SFT_CHUNK, total - self.sft_done))
            self.sft_done = min(self.sft_done + _SFT_CHUNK, total)
            self.watch.sft(self.sft_done, total, metrics)
            if every and self.sft_done % every == 0 and self.sft_done < total:
                controller.extra_state = self._state()
                await self.learner.save(self.sft_done, controller.state_dict())

    async def _measure(self, when: str, version: int) -> None:
        greedy = await self._evaluate(SamplingMode("greedy", 0.0, 1), version)
        sampled = await self._evaluate(
            SamplingMode("sampled", self.config.engine.temperature, self.config.eval.samples), version
        )
        gap = await self.learner.mismatch(sampled)
        self.watch.log(
            "eval", version, {f"eval/{self.config.env.title}/kl.mismatch.{k}": v for k, v in gap.items()}
        )
        self.results[when] = {}
        for name, trajectories in (("greedy", greedy), ("sampled", sampled)):
            result = summarize(trajectories)
            self.watch.log("eval", version, result.metrics(f"eval/{self.config.env.title}/{name}"))
            for env, members in self._by_environment(trajectories).items():
                self.watch.log("eval", version, summarize(members).metrics(f"eval/{env}/{name}"))
            self.results[when] |= {f"{name}.{key}": value for key, value in asdict(result).items()}

    async def _measure_curve(self, version: int) -> None:
        """Measures what each effort of the grid costs and brings, greedily and on the same tasks."""
        evaluation = self.config.eval
        if not evaluation.efforts:
            return
        mode, title = SamplingMode("greedy", 0.0, 1), self.config.env.title
        tasks = self._eval_tasks(evaluation.effort_tasks)
        assignments = [
            self._assignment(effort, g, 0, env, task, mode)
            for effort in evaluation.efforts
            for g, (env, task) in enumerate(tasks)
        ]
        done = await self._sampled(assignments, f"efforts (version {version})")
        points = effort_curve.curve(done, self.config.effort.length_penalty)
        self.watch.log("eval", version, effort_curve.metrics(points, f"eval/{title}/greedy"))
        self.watch.curve(points)

    async def _evaluate(self, mode: SamplingMode, version: int) -> list[Trajectory]:
        return await self._sampled(self._evaluation(mode), f"evaluate ({mode.name}, version {version})")

    async def _sampled(self, assignments: Sequence[Assignment], phase: str) -> list[Trajectory]:
        """Runs samples, no more at a time than in training: one that waits long would miss its deadline."""
        done: list[Trajectory] = []
        started, most = 0, self.config.rollout.max_in_flight
        while len(done) < len(assignments):
            until = min(len(assignments), len(done) + most)
            if until > started:
                await self.generator.submit(assignments[started:until])
                started = until
            done += await self.generator.collect(1.0)
            self.watch.phase(phase, len(done), len(assignments))
        return done

    def _evaluation(self, mode: SamplingMode) -> list[Assignment]:
        tasks, levels = self._eval_tasks(self.config.eval.tasks), self.config.effort.levels
        return [
            self._assignment(levels[g % len(levels)], g, i, env, task, mode)
            for g, (env, task) in enumerate(tasks)
            for i in range(mode.samples)
        ]

    def _assignment(
        self, effort: int, group: int, index: int, env: str, task: Task, mode: SamplingMode
    ) -> Assignment:
        return Assignment(
            key=TrajectoryKey(task.id, effort, self.config.scaffold.name, group, index),
            task=task,
            environment=env,
            sampling=self._sampling(mode.temperature),
            seed=self.config.run.seed + _EVAL_SEED,
            purpose=Purpose.EVAL,
        )

    def _eval_tasks(self, count: int) -> list[tuple[str, Task]]:
        """The evaluation's first `count` tasks with their environments, by the mixture's shares."""
        environments, split = load_environments(self.config), self.config.env.eval_split
        parts = {name: zip(repeat(name), env.tasks(split, _EVAL_SEED)) for name, env in environments.items()}
        return list(islice(interleaved(parts, shares(self.config, environments)), count))

    def _by_environment(self, trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
        """The trajectories of an evaluation by environment, when there are several."""
        found: dict[str, list[Trajectory]] = {}
        names = (
            [name for name, _ in self._eval_tasks(self.config.eval.tasks)] if self.config.env.mixture else []
        )
        for trajectory in trajectories if names else []:
            found.setdefault(names[trajectory.key.group], []).append(trajectory)
        return found

    def _sampling(self, temperature: float) -> SamplingParams:
        engine = self.config.engine
        return SamplingParams(
            temperature=temperature,
            top_p=engine.top_p,
            top_k=engine.top_k,
            max_tokens=engine.max_completion_tokens,
        )

    async def _restore(self, controller: Controller, checkpoint: Checkpoint) -> None:
        state = await self.learner.restore(checkpoint)
        controller.load_state_dict(state)
        self.sft_done = controller.extra_state["sft_done"]
        self.results = controller.extra_state["results"]
        if "before" not in self.results:
            return
        await self.publish()
        recovered = await self.generator.recover(controller.version)
        other = _of_other_tasks(controller, recovered)
        plan = plan_resume(controller.dispatcher, [recovered.without(other)])
        controller.stream.pin([*(t.key for t in plan.receive), *plan.resubmit])
        for group in plan.groups:
            controller.announce(group)
        await self.learner.recovered(controller.dispatcher.cursor)
        await self.generator.consumed([*plan.forget, *other])
        controller.receive(plan.receive)
        await self.generator.resubmit(plan.resubmit)
        self.watch.note(
            f"resumed at step {checkpoint.step}; the token log held {len(plan.receive)} finished samples, "
            f"{len(plan.resubmit)} unfinished ones that go on at their next token, and {len(plan.forget)} "
            f"that the checkpoint had used; {recovered.lost_tokens} tokens were lost"
        )
        if other:
            self.watch.note(f"{len(other)} samples of tasks that their groups do not have now begin anew")

    def _results(self, when: str) -> dict[str, EvalResult]:
        flat = self.results[when]
        names = ("greedy", "sampled")
        return {
            name: EvalResult(**{k.split(".", 1)[1]: v for k, v in flat.items() if k.startswith(f"{name}.")})  # type: ignore[arg-type]
            for name in names
        }


def _of_other_tasks(controller: Controller, recovered: Recovered) -> set[TrajectoryKey]:
    """Samples of groups that the checkpoint does not know and that have another task now.

    They began under a mix, say, that was changed after it and is not in force for these groups any more.
    """
    keys = recovered.beyond(controller.dispatcher.cursor)
    controller.stream.pin(keys)
    drawn = {group: controller.stream.draw(group) for group in dict.fromkeys(key.group for key in keys)}
    return {key for key in keys if (key.task, key.effort) != (drawn[key.group][0].id, drawn[key.group][1])}


@dataclass(frozen=True, slots=True)
class SamplingMode:
    """How an evaluation samples: `samples` times a task at a temperature (0: greedy)."""

    name: str
    temperature: float
    samples: int
