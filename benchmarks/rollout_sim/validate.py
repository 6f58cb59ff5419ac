"""Whether the simulator is right: predicted against measured time of three rules on the real engine.

`python -m benchmarks.rollout_sim --validate`. Each rule runs twice on the same trace with the same tools and
trainer: once on the native engine with a nano policy on one core, once on simulated engines. The real engine
computes every token; virtual time advances by the processor time that each of its steps took, so that other
work on the machine counts for nothing, and tools wait in virtual time. Its costs are not taken from those
steps: a second engine over the same policy measures them, a few steps at a time between those of the run. The
last line is `validated E%`, the largest error of a rule; exit status 1 above 10 %.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from benchmarks.rollout_sim.costs import Costs
from benchmarks.rollout_sim.engine import Clock, Sample
from benchmarks.rollout_sim.schedulers import RULES
from benchmarks.rollout_sim.simulate import Simulation
from benchmarks.rollout_sim.stats import Result
from benchmarks.rollout_sim.trace import BLOCK, Block, SyntheticTrace, Trace, block, split
from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.requests import Request, StepOutput
from model.engine.sampler import SamplingParams
from model.policy import Policy

VALIDATED = ("barrier", "areal", "ours")
BOUND = 0.10
_LONGEST, _PROMPT, _OBSERVATION, _TURN = 240, 24, 12, 48
_CONTEXT = _PROMPT + _LONGEST + (_LONGEST // _TURN + 1) * (_OBSERVATION + 1)
_BATCHES = (16, 4, 12, 16, 8, 1, 14, 2)
_EVERY = 12
COSTS = Costs(
    replicas=1,
    slots=16,
    groups_per_step=4,
    group_size=4,
    in_flight=32,
    staleness=4,
    prefill_gather_steps=4,
    trainer_s=0.5,
    update_pause_s=0.0,
    sandbox_create_s=0.05,
    sandbox_failure=0.0,
)


class ShortTrace(SyntheticTrace):
    """The long-tailed trace at the scale of a nano policy: log-normal lengths, a Pareto tail, slow tools."""

    def _draw(self, rng: np.random.Generator) -> Block:
        body = np.exp(rng.normal(np.log(40.0), 0.7, BLOCK))
        tail = 100.0 * (1.0 - rng.random(BLOCK)) ** -0.5
        lengths = np.clip(np.where(rng.random(BLOCK) < 0.05, tail, body), 4, _LONGEST).astype(np.int64)
        turns = 1 + lengths // _TURN
        inputs = np.full(turns.sum(), _OBSERVATION)
        inputs[np.cumsum(turns) - turns] = _PROMPT
        tools = rng.exponential(0.1, turns.sum()) + 1.0 * (rng.random(turns.sum()) < 0.02)
        return block(turns, inputs, split(lengths, turns), tools)


def contexts(trace: Trace, samples: int = BLOCK) -> np.ndarray:
    """Returns the tokens before each token that the first samples of a trace decode."""
    found = []
    for work in (trace.work(number, 0) for number in range(samples)):
        ends = np.cumsum(np.array(work.inputs) + np.array(work.outputs))
        found += [np.arange(end - new, end) for end, new in zip(ends, work.outputs, strict=True)]
    return np.concatenate(found)


@dataclass(slots=True)
class Probe:
    """Measures the costs of steps on an engine of its own: rows that sample, prefills, and their tokens.

    Its requests decode at contexts as long as those of the trace's samples, as a step's time depends on them.
    """

    engine: Engine
    rng: np.random.Generator
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    _requests: int = 0
    _contexts: np.ndarray = field(default_factory=lambda: contexts(ShortTrace(0)))

    def measure(self, batch: int) -> None:
        """Runs `batch` requests for a few steps: one to three of them come while the others decode."""
        late = min(batch, 1 + self._requests % 3)
        for _ in range(batch - late):
            self._submit(10, min(int(self.rng.choice(self._contexts)), _CONTEXT - 10))
        for _ in range(3 if batch > late else 0):
            self._step()
        for _ in range(late):
            self._submit(4, int(self.rng.choice((_PROMPT, _OBSERVATION + 1))))
        while self.engine.has_work:
            self._step()

    def forget(self) -> None:
        """Drops what was measured."""
        self.rows.clear()
        self.seconds.clear()

    def costs(self) -> Costs:
        """Returns `COSTS` with the measured times, by least squares."""
        rows = np.array(self.rows, dtype=np.float64)
        columns = np.column_stack([np.ones(len(rows)), rows])
        base, each, prefill, token = np.linalg.lstsq(columns, np.array(self.seconds), rcond=None)[0]
        return replace(
            COSTS,
            decode_base_s=float(max(base, 1e-5)),
            decode_per_request_s=float(max(each, 0.0)),
            prefill_base_s=float(max(prefill, 0.0)),
            prefill_tokens_per_s=float(1.0 / max(token, 1e-8)),
        )

    def _step(self) -> None:
        """Takes a step and notes it, unless it only computes prompts, or more of them than a run's steps."""
        decoding, before = self.engine.scheduler.running.size, self.engine.counters.prefilled_tokens
        seconds, output = timed_step(self.engine)
        tokens = self.engine.counters.prefilled_tokens - before
        if decoding and tokens <= 3 * _PROMPT:
            self.rows.append((output.token_ids.size, int(tokens > 0), tokens))
            self.seconds.append(seconds)

    def _submit(self, tokens: int, length: int) -> None:
        self._requests += 1
        prompt = self.rng.integers(0, self.engine.policy.config.vocab_size, length)
        self.engine.submit(Request(f"probe-{self._requests}", prompt, _sampling(self.engine, tokens)))


@dataclass(slots=True)
class _Step:
    """The step under way."""

    next_end: float = float("inf")
    output: StepOutput | None = None


class RealEngine:
    """The native engine as a simulation's engines: a step is computed when time comes to it.

    Requests that arrive while a step is under way wait for the next one, as they do in earnest.
    """

    def __init__(self, engine: Engine, probe: Probe) -> None:
        self._engine, self._probe = engine, probe
        self.version = self.cached_tokens = self.computed_tokens = self.steps = 0
        self._now = 0.0
        self._step = _Step()
        self._turns: dict[int, Sample] = {}
        self._histories: dict[Sample, list[int]] = {}

    @property
    def running(self) -> int:
        """Requests that are being served."""
        return self._engine.running

    def next_end(self) -> Clock:
        """The step under way, which is begun here when there is something to do."""
        if self._step.output is None and self._engine.has_work:
            seconds, output = timed_step(self._engine)
            self._step = _Step(self._now + seconds, output)
            self.steps += 1
            if self.steps % _EVERY == 0:
                self._probe.measure(_BATCHES[self.steps // _EVERY % len(_BATCHES)])
        return self._step

    def request(self, sample: Sample, now: float) -> None:
        """Submits the sample's next turn, with its whole history."""
        self._now = max(self._now, now)
        history = self._histories.setdefault(sample, [])
        rng = np.random.default_rng((sample.number, sample.turn))  # no two alike: the engine would share them
        history += rng.integers(
            0, self._engine.policy.config.vocab_size, sample.work.inputs[sample.turn]
        ).tolist()
        tokens = sample.work.outputs[sample.turn]
        request = Request(
            f"sample-{sample.number}", history, _sampling(self._engine, tokens), continues=sample.turn > 0
        )
        self._turns[self._engine.submit(request)] = sample

    def ended(self, replica: Clock, now: float) -> list[Sample]:
        """Books the tokens of the step that ended, and returns the samples whose turn it completed."""
        output, self._step, self._now = self._step.output, _Step(), now
        assert output is not None, "only a step under way can end"
        for request in output.request_ids.tolist():
            self._turns[request].add(self.version, 1)
        ended = [self._turns.pop(finished.request_id) for finished in output.finished]
        for sample, finished in zip(ended, output.finished, strict=True):
            self._histories[sample] += finished.turn.token_ids.tolist()
            sample.turn += 1
            if sample.turn == len(sample.work.outputs):
                del self._histories[sample]
                self._engine.release(f"sample-{sample.number}")
        return ended

    def update(self, version: int, now: float) -> None:
        """Counts the next version; the weights stay, which costs the engine the same."""
        self._engine.set_version(version)
        self.version = version

    def abort(self, now: float) -> list[Sample]:
        """No rule that is validated restarts samples."""
        raise NotImplementedError


def timed_step(engine: Engine) -> tuple[float, StepOutput]:
    """Takes a step; returns the seconds of processor time it took and what it sampled."""
    before = time.thread_time()
    output = engine.step()
    return time.thread_time() - before, output


def measure(policy: Policy, rule: str, steps: int, seed: int = 0) -> tuple[Result, Costs]:
    """Runs a rule on the real engine; returns what it took, and the costs measured beside it."""
    probe = Probe(open_engine(policy, 0), np.random.default_rng(seed))
    for batch in _BATCHES:  # the first calls of every shape are slower
        probe.measure(batch)
    probe.forget()
    engines = RealEngine(open_engine(policy, COSTS.in_flight), probe)
    trace, scheduler = ShortTrace(seed), RULES[rule](COSTS)
    result = Simulation(COSTS, trace, scheduler, steps=steps, warm_up=0, engines=engines).run()
    return result, probe.costs()


def main(steps: int = 10) -> int:
    """Prints predicted and measured seconds of each rule; returns the exit status."""
    torch.set_num_threads(1)
    policy, worst = Policy(PolicyConfig.preset("nano")), 0.0
    policy.reset_parameters(0)
    print(
        f"{'rule':<9}{'measured s':>11}{'predicted s':>12}{'error %':>9}{'idle %':>8}{'predicted':>10}  costs"
    )
    for rule in VALIDATED:
        real, costs = measure(policy, rule, steps)
        predicted = Simulation(costs, ShortTrace(0), RULES[rule](costs), steps=steps, warm_up=0).run()
        error = predicted.total_s / real.total_s - 1.0
        worst = max(worst, abs(error))
        print(
            f"{rule:<9}{real.total_s:>11.2f}{predicted.total_s:>12.2f}{100 * error:>9.1f}"
            f"{100 * real.idle:>8.1f}{100 * predicted.idle:>10.1f}  step "
            f"{1e3 * costs.decode_base_s:.2f} ms + {1e3 * costs.decode_per_request_s:.3f} ms a request, "
            f"prefill {1e3 * costs.prefill_base_s:.2f} ms + {1e6 / costs.prefill_tokens_per_s:.1f} us a token"
        )
    print(f"validated {100 * worst:.1f}%")
    return 0 if worst <= BOUND else 1


def open_engine(policy: Policy, idle: int) -> Engine:
    """Returns an engine of `COSTS.slots` rows that keeps the caches of so many waiting samples."""
    return Engine(policy, max_requests=COSTS.slots, max_tokens=_CONTEXT + 2, idle_sessions=idle)


def _sampling(engine: Engine, tokens: int) -> SamplingParams:
    nothing = frozenset({engine.policy.config.vocab_size})
    return SamplingParams(max_tokens=tokens, stop_ids=nothing, seed=0)


if __name__ == "__main__":
    sys.exit(main())
