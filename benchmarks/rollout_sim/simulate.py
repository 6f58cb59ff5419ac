"""One run: the events of engines, tools and trainer in the order of virtual time, under one rule."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from dataclasses import dataclass, field

from benchmarks.rollout_sim.costs import Costs
from benchmarks.rollout_sim.engine import Engines, Fleet, Sample
from benchmarks.rollout_sim.schedulers import Scheduler
from benchmarks.rollout_sim.stats import Result, length_bin
from benchmarks.rollout_sim.trace import Trace
from rl.rollout.dispatch import SampleId

_REQUEST, _FAIL, _TRAINED = range(3)
_EARLY = 10


@dataclass(slots=True)
class _Group:
    missing: int
    lengths: array[int] = field(default_factory=lambda: array("q"))
    versions: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))


class Simulation:
    """Runs `steps` optimiser steps on simulated engines (or `engines`) and measures those after `warm_up`."""

    def __init__(
        self,
        costs: Costs,
        trace: Trace,
        rule: Scheduler,
        *,
        steps: int,
        warm_up: int,
        engines: Engines | None = None,
    ) -> None:
        assert 0 <= warm_up < steps, "something must be left to measure"
        self.costs, self.trace, self.rule = costs, trace, rule
        self.steps, self.warm_up = steps, warm_up
        self.fleet: Engines = Fleet(costs) if engines is None else engines
        self.result = Result(rule.name, costs.total_slots)
        self.now = 0.0
        self.version = 0
        self.live = 0
        self.groups: dict[int, _Group] = {}
        self.ready: deque[int] = deque()
        self._training: list[int] = []
        self._timers: list[tuple[float, int, int, Sample | None]] = []
        self._order = 0
        self._unpublished = False
        self._measuring = False
        self._began = 0.0

    def run(self) -> Result:
        """Returns the measures; the virtual clock starts at 0 with nothing in flight."""
        self.start()
        while self.version < self.steps:
            self.step()
        self.result.seconds = self.now - self._began
        self.result.total_s = self.now
        self.result.steps = self.steps - self.warm_up
        self.result.cached_tokens = self.fleet.cached_tokens
        self.result.computed_tokens = self.fleet.computed_tokens
        return self.result

    def start(self) -> None:
        """Begins the first samples; `run` does it, whoever calls `step` himself does it first."""
        if self.warm_up == 0:
            self._measure()
        self._turn_over()

    def step(self) -> None:
        """Handles the next event."""
        replica = self.fleet.next_end()
        timer = self._timers[0][0] if self._timers else float("inf")
        assert min(timer, replica.next_end) < float("inf"), (
            f"nothing will ever happen again ({self.rule.name})"
        )
        if timer < replica.next_end:
            self._pass(timer)
            _, _, kind, sample = heapq.heappop(self._timers)
            self._timer(kind, sample)
        else:
            self._pass(replica.next_end)
            for sample in self.fleet.ended(replica, self.now):
                self._turn_ended(sample)

    def _timer(self, kind: int, sample: Sample | None) -> None:
        if kind == _TRAINED:
            self._trained()
            return
        assert sample is not None
        if kind == _REQUEST:
            self.fleet.request(sample, self.now)
            return
        self.live -= 1
        self.rule.finish(_id(sample), "sandbox", self.now)
        self._turn_over()

    def _turn_ended(self, sample: Sample) -> None:
        if sample.turn < len(sample.work.outputs):
            self._at(sample.work.tools[sample.turn - 1], _REQUEST, sample)
            return
        self.live -= 1
        key = _id(sample)
        group = self.groups[key.group]
        group.missing -= 1
        group.lengths.append(sum(sample.tokens))
        group.versions.extend(sample.versions)
        group.tokens.extend(sample.tokens)
        self.rule.finish(key, "", self.now)
        if group.missing == 0:
            self.ready.append(key.group)
            self.rule.completed(key.group)
        self._turn_over()

    def _turn_over(self) -> None:
        """Whatever an event made possible: publish, train, start."""
        if self._unpublished and (not self.rule.holds_weights or not self._open()):
            self._publish()
        if not self._training and len(self.ready) >= self.costs.groups_per_step:
            self._train()
        for key in self.rule.start(self.now):
            self._begin(key)

    def _open(self) -> bool:
        return len(self.groups) > len(self.ready) + len(self._training)

    def _begin(self, key: SampleId) -> None:
        if key.group not in self.groups:
            self.groups[key.group] = _Group(self.costs.group_size)
        number = key.group * self.costs.group_size + key.index
        self.live += 1
        self.result.peak_live = max(self.result.peak_live, self.live)
        failed = key.attempt == 0 and number * 0.6180339887498949 % 1.0 < self.costs.sandbox_failure
        sample = Sample(key, number, 0, self.trace.work(number, 0))
        self._at(self.costs.sandbox_create_s, _FAIL if failed else _REQUEST, sample)

    def _train(self) -> None:
        batch = [self.ready.popleft() for _ in range(self.costs.groups_per_step)]
        tokens = sum(self._book(self.groups[number]) for number in batch)
        seconds = self.costs.trainer_s + self.costs.trainer_s_per_token * tokens
        if self._measuring:
            self.result.trainer_busy_s += seconds
        self._training = batch
        self.rule.taken(batch)
        self._at(seconds, _TRAINED, None)

    def _book(self, group: _Group) -> int:
        """Measures a group as it is trained; returns its tokens. Those beyond the bound carry no loss."""
        if self.version < _EARLY:
            for length in group.lengths:
                self.result.early[length_bin(length)] += 1
        if self._measuring:
            for length in group.lengths:
                self.result.lengths[length_bin(length)] += 1
            self.result.samples += len(group.lengths)
            for version, tokens in zip(group.versions, group.tokens, strict=True):
                lag = self.version - version
                if lag > self.costs.staleness:
                    self.result.masked += tokens
                else:
                    self.result.tokens += tokens
                    self.result.lags[lag] += tokens
        return sum(group.lengths)

    def _trained(self) -> None:
        batch, self._training = self._training, []
        for number in batch:
            del self.groups[number]
        self.version += 1
        self.rule.trained(batch, self.version)
        self._unpublished = True
        if self.version == self.warm_up:
            self._measure()
        self._turn_over()

    def _publish(self) -> None:
        self._unpublished = False
        if self.rule.restarts:
            self._restart()
        if self._measuring:
            self.result.busy -= self.fleet.running * self.costs.update_pause_s
        self.fleet.update(self.version, self.now)

    def _restart(self) -> None:
        for sample in self.fleet.abort(self.now):
            if not sample.tokens:
                self._at(0.0, _REQUEST, sample)
                continue
            if self._measuring:
                self.result.wasted += sum(sample.tokens)
            draw = sample.draw + 1
            anew = Sample(sample.key, sample.number, draw, self.trace.work(sample.number, draw))
            self._at(self.costs.sandbox_create_s, _REQUEST, anew)

    def _measure(self) -> None:
        self._measuring, self._began = True, self.now

    def _pass(self, now: float) -> None:
        if self._measuring:
            running, seconds = self.fleet.running, now - self.now
            self.result.busy += running * seconds
            self.result.concurrency += running * seconds
            self.result.concurrency2 += running * running * seconds
        self.now = now

    def _at(self, seconds: float, kind: int, sample: Sample | None) -> None:
        self._order += 1
        heapq.heappush(self._timers, (self.now + seconds, self._order, kind, sample))


def _id(sample: Sample) -> SampleId:
    assert isinstance(sample.key, SampleId)
    return sample.key
