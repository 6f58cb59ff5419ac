"""The engines in virtual time: replicas with slots, a shared queue, prefill, caches and weight updates.

Every running request of a replica gets one token a decode step, so a replica needs one clock, counted in
decode steps: a request ends when the clock has advanced by its tokens. A run costs a few heap operations a
turn, whatever the number of tokens.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Protocol

from benchmarks.rollout_sim.costs import Costs
from benchmarks.rollout_sim.trace import Work

_SLACK = 1e-6


class Sample:
    """A live sample: what it does, how far it is, and which policy version sampled how many of its tokens."""

    __slots__ = ("begun", "context", "draw", "home", "key", "number", "tokens", "turn", "versions", "work")

    def __init__(self, key: object, number: int, draw: int, work: Work) -> None:
        self.key, self.number, self.draw, self.work = key, number, draw, work
        self.turn = 0
        self.context = 0
        self.home = -1
        self.begun = 0.0
        self.versions = array("q")
        self.tokens = array("q")

    def add(self, version: int, tokens: int) -> None:
        """Books sampled tokens; versions never fall."""
        if tokens <= 0:
            return
        if self.versions and self.versions[-1] == version:
            self.tokens[-1] += tokens
        else:
            self.versions.append(version)
            self.tokens.append(tokens)


class Replica:
    """One engine: `clock` counts decode steps, `now` is the time to which it was advanced."""

    def __init__(self, index: int, costs: Costs) -> None:
        self.index, self._costs = index, costs
        self.running: list[tuple[float, int, Sample]] = []
        self.gathering: list[tuple[Sample, int]] = []
        self.turns: deque[Sample] = deque()
        self.idle: OrderedDict[Sample, int] = OrderedDict()
        self.idle_tokens = self.reserved_tokens = 0
        self.clock = self.now = self.blocked_until = 0.0
        self.next_end = float("inf")
        self._shared_until = -1.0
        self._due = 0.0
        self._order = 0

    @property
    def served(self) -> int:
        """Requests in slots: those that decode and those that wait for their prefill."""
        return len(self.running) + len(self.gathering)

    @property
    def free(self) -> int:
        """Slots without a request."""
        return self._costs.slots - self.served

    def advance(self, now: float) -> None:
        """Decodes until `now`; prefill and pauses come first."""
        begin = max(self.now, self.blocked_until)
        if self.running and now > begin:
            self.clock += (now - begin) / self._step_s()
        self.now = now

    def fits(self, sample: Sample) -> bool:
        """Whether the turn's final context can be reserved; an empty replica takes any turn."""
        return not self.served or self.reserved_tokens + _final_context(sample) <= self._costs.kv_tokens

    def start(self, sample: Sample) -> tuple[int, int]:
        """Puts a turn into a slot; returns the tokens found in the cache and those computed."""
        cached = self.idle.pop(sample, 0)
        self.idle_tokens -= cached
        computed = sample.context - cached + sample.work.inputs[sample.turn]
        self.reserved_tokens += _final_context(sample)
        while self.idle and self.idle_tokens + self.reserved_tokens > self._costs.kv_tokens:
            self.idle_tokens -= self.idle.popitem(last=False)[1]
        if not self.gathering:
            self._due = self._boundary() + self._costs.prefill_gather_steps - 1
        sample.home = self.index
        self.gathering.append((sample, computed))
        if self._costs.prefill_gather_steps == 1 or not self.running:
            self._begin()
        return cached, computed

    def ended(self) -> Iterator[Sample]:
        """Takes out requests whose last token is sampled; keeps their caches if their samples go on."""
        while self.running and self.running[0][0] <= self.clock + _SLACK:
            sample = heapq.heappop(self.running)[2]
            context = _final_context(sample)
            self.reserved_tokens -= context
            sample.context, sample.turn = context, sample.turn + 1
            if sample.turn < len(sample.work.outputs):
                self.idle[sample] = context
                self.idle_tokens += context
            yield sample

    def drop_all(self) -> list[Sample]:
        """Aborts every request in a slot and forgets their caches."""
        dropped = [sample for _, _, sample in self.running] + [sample for sample, _ in self.gathering]
        self.running.clear()
        self.gathering.clear()
        self.reserved_tokens = 0
        return dropped

    def block(self, seconds: float) -> None:
        """Lets the replica do something other than decode for so long."""
        self.blocked_until = max(self.now, self.blocked_until) + seconds

    def _boundary(self) -> float:
        """The step that a turn which comes now begins with."""
        return math.ceil(self.clock - _SLACK)

    def _begin(self) -> None:
        """Prefills the turns that were gathered, and lets them decode from the next step on."""
        self._prefill(sum(tokens for _, tokens in self.gathering))
        for sample, _ in self.gathering:
            sample.begun = self._boundary()
            self._order += 1
            end = sample.begun + sample.work.outputs[sample.turn]
            heapq.heappush(self.running, (end, self._order, sample))
        self.gathering.clear()

    def _gather(self) -> None:
        """Begins gathered turns: together with others' prefill, after long enough, or when they are many."""
        if len(self.gathering) * self._costs.prefill_gather_steps >= len(self.running):
            self._due = min(self._due, self._boundary())
        if self._due <= self.clock + _SLACK or not self.running or self.now <= self._shared_until:
            self._begin()

    def _prefill(self, tokens: int) -> None:
        """Computes a turn's prompt, together with those of turns that wait for the same step."""
        seconds = tokens / self._costs.prefill_tokens_per_s
        if self.now > self._shared_until or not self.running:
            seconds += self._costs.prefill_base_s
            rest_s = (self._boundary() - self.clock) * self._step_s()
            self._shared_until = max(self.now, self.blocked_until) + rest_s
        self.block(seconds)

    def recompute(self) -> int:
        """Drops every cache after an update and prefills the running contexts again; returns their tokens."""
        self.idle.clear()
        self.idle_tokens = 0
        tokens = sum(
            s.context + s.work.inputs[s.turn] + int(self.clock - s.begun) for _, _, s in self.running
        )
        tokens += sum(s.context for s, _ in self.gathering)
        self.block(tokens / self._costs.prefill_tokens_per_s)
        return tokens

    def schedule(self) -> None:
        """Works out when the next request ends or gathered turns are due; call after every change."""
        if self.gathering:
            self._gather()
        if not self.running:
            self.next_end = float("inf")
            return
        until = min(self.running[0][0], self._due) if self.gathering else self.running[0][0]
        steps = max(0.0, until - self.clock)
        self.next_end = max(self.now, self.blocked_until) + steps * self._step_s()

    def _step_s(self) -> float:
        return self._costs.decode_base_s + self._costs.decode_per_request_s * len(self.running)


class Clock(Protocol):
    """Something that says when it next has an end to report."""

    next_end: float


class Engines(Protocol):
    """What a simulation asks of its engines: simulated ones (`Fleet`), or a real one."""

    version: int
    cached_tokens: int
    computed_tokens: int

    @property
    def running(self) -> int:
        """Requests in slots."""
        ...

    def next_end(self) -> Clock:
        """Who reports next, and when; an infinite time when nothing runs."""
        ...

    def request(self, sample: Sample, now: float) -> None:
        """Asks for the sample's next turn."""
        ...

    def ended(self, replica: Clock, now: float) -> list[Sample]:
        """Returns the samples whose turn ended, and goes on."""
        ...

    def update(self, version: int, now: float) -> None:
        """Publishes weights."""
        ...

    def abort(self, now: float) -> list[Sample]:
        """Takes every request out."""
        ...


class Fleet:
    """All replicas: a turn goes to its cache, else to a free slot, else to a queue; turns come first.

    What every event asks of all replicas is kept in columns, one entry a replica, which `_note` updates.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.replicas = [Replica(i, costs) for i in range(costs.replicas)]
        self._ends = [float("inf")] * costs.replicas
        self._loads = [0] * costs.replicas
        self.waiting: deque[Sample] = deque()
        self.cached_tokens = self.computed_tokens = 0
        self.version = 0

    @property
    def running(self) -> int:
        """Requests in slots."""
        return sum(self._loads)

    def next_end(self) -> Replica:
        """The replica with the next event; its `next_end` is infinite when nothing runs."""
        return self.replicas[self._ends.index(min(self._ends))]

    def request(self, sample: Sample, now: float) -> None:
        """Asks for the sample's next turn."""
        home = self.replicas[sample.home] if sample.home >= 0 else None
        if home is not None and home.free and home.fits(sample):
            self._start(home, sample, now)
            self._note(home)
            return
        best = self.replicas[self._loads.index(min(self._loads))]
        if best.free and best.fits(sample):
            self._start(best, sample, now)
            self._note(best)
        elif home is not None:
            home.turns.append(sample)
        else:
            self.waiting.append(sample)

    def ended(self, replica: Clock, now: float) -> list[Sample]:
        """Returns the samples whose turn ended on the replica, and fills its slots."""
        assert isinstance(replica, Replica)
        replica.advance(now)
        ended = []
        for sample in replica.ended():
            sample.add(self.version, round(replica.clock - sample.begun))
            ended.append(sample)
        self.fill(replica, now)
        return ended

    def fill(self, replica: Replica, now: float) -> None:
        """Starts queued turns: of this replica, of new samples, then of the longest other queue."""
        while replica.free:
            queue = replica.turns or self.waiting or max(self.replicas, key=_queued).turns
            if not queue or not replica.fits(queue[0]):
                break
            self._start(replica, queue.popleft(), now)
        self._note(replica)

    def update(self, version: int, now: float) -> None:
        """Publishes weights: requests stop at a token boundary, pause, and go on under the new version."""
        for replica in self.replicas:
            replica.advance(now)
            for _, _, sample in replica.running:
                self._book(replica, sample)
            if self._costs.kv_on_update == "recompute":
                self.computed_tokens += replica.recompute()
            replica.block(self._costs.update_pause_s)
            self._note(replica)
        self.version = version

    def abort(self, now: float) -> list[Sample]:
        """Takes every request that has a slot or waits for one out of the engines."""
        aborted = []
        for replica in self.replicas:
            replica.advance(now)
            for _, _, sample in replica.running:
                self._book(replica, sample)
            aborted += [*replica.drop_all(), *replica.turns]
            replica.turns.clear()
            self._note(replica)
        for sample in aborted:
            self.forget(sample)
        return aborted

    def forget(self, sample: Sample) -> None:
        """Frees the cache of a sample that waits or ended."""
        if sample.home >= 0:
            replica = self.replicas[sample.home]
            replica.idle_tokens -= replica.idle.pop(sample, 0)

    def _note(self, replica: Replica) -> None:
        """Notes when the replica has its next event, and its load; call after every change."""
        replica.schedule()
        self._ends[replica.index] = replica.next_end
        self._loads[replica.index] = replica.served

    def _book(self, replica: Replica, sample: Sample) -> None:
        """Books the whole tokens since the turn began or was last booked."""
        tokens = max(0, int(replica.clock - sample.begun))
        sample.add(self.version, tokens)
        sample.begun += tokens

    def _start(self, replica: Replica, sample: Sample, now: float) -> None:
        replica.advance(now)
        if sample.home not in (-1, replica.index):
            self.forget(sample)
        cached, computed = replica.start(sample)
        self.cached_tokens += cached
        self.computed_tokens += computed


def _final_context(sample: Sample) -> int:
    return sample.context + sample.work.inputs[sample.turn] + sample.work.outputs[sample.turn]


def _queued(replica: Replica) -> int:
    return len(replica.turns)
