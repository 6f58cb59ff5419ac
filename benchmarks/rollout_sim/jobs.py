"""Runs as small records, so that any process can do them, and curves made of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.rollout_sim.costs import Costs
from benchmarks.rollout_sim.report import Curve
from benchmarks.rollout_sim.schedulers import RULES
from benchmarks.rollout_sim.simulate import Simulation
from benchmarks.rollout_sim.stats import Result
from benchmarks.rollout_sim.trace import AgentTrace, FileTrace, LongTailTrace, Trace, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run, small enough to send to another process: `alpha` is the tail's, 0 means an agent's trace."""

    rule: str
    costs: Costs
    seed: int
    steps: int
    warm_up: int
    alpha: float = 2.0
    file: tuple[Work, ...] = ()

    def trace(self) -> Trace:
        """The samples of this run."""
        if self.file:
            return FileTrace(list(self.file), self.seed)
        return LongTailTrace(self.seed, alpha=self.alpha) if self.alpha else AgentTrace(self.seed)


def run_job(job: Job) -> Result:
    """Simulates one run."""
    rule = RULES[job.rule](job.costs)
    return Simulation(job.costs, job.trace(), rule, steps=job.steps, warm_up=job.warm_up).run()


Runner = Callable[[Sequence[Job]], list[Result]]


def curve(run: Runner, jobs: Sequence[tuple[float, Job]], others: Sequence[str]) -> Curve:
    """The ratio of ours to other rules over a setting; `jobs` are one of ours each, with the setting."""
    every = [replace(job, rule=rule) for _, job in jobs for rule in ("ours", *others)]
    rates = [result.tokens_per_s for result in run(every)]
    width = 1 + len(others)
    return {
        f"against {rule}": [(x, rates[i * width] / rates[i * width + k]) for i, (x, _) in enumerate(jobs)]
        for k, rule in enumerate(others, 1)
    }
