"""Which samples run next: a pure, deterministic state machine without clock, loop or process.

Dispatch is sample-level. A counter of finished samples, whatever their group, starts at `max_in_flight`;
when it reaches the group size of the next prompt, that prompt starts and the counter falls by it. So
concurrency stays flat and no prompt waits for the slowest member of another. Staleness is bounded where
work begins: with the policy at version v, at most (v + staleness + 1) x groups_per_step groups (and a
filter's surplus) may be accepted or running, so nothing is sampled only to be thrown away as too old. Dropped
groups free their place. Group g always gets number g, so that a task stream indexed by it repeats its order
after a resume. A group whose environment is full or rests is put off while others go on, at most
`groups_per_step` of them: then everything waits, so that a mixture keeps its shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rl.rollout.breaker import CircuitBreaker
from rl.rollout.config import RolloutConfig, RolloutConfigError
from rl.rollout.ledger import Account, Ledger, Member, MemberState, OpenGroup

_FORMAT = 1


@dataclass(frozen=True, slots=True, order=True)
class SampleId:
    """One attempt at one sample of a group."""

    group: int
    index: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How many samples group number g has and whose environment runs them; a pure function of g gives it."""

    size: int
    environment: str


class Ending(StrEnum):
    """What became of a reported sample: final, to be run again, or already reported."""

    FINAL = "final"
    RETRY = "retry"
    DUPLICATE = "duplicate"


class DispatchError(ValueError):
    """A report about a group that cannot be right, or a state of another format."""


def staleness_capacity(
    *,
    version: int,
    staleness: int,
    batch: int,
    accepted: int,
    running: int,
    max_in_flight: int | None = None,
) -> int:
    """How many more may start: (version + staleness + 1) x batch - (accepted + running).

    With `max_in_flight` also at most `max_in_flight - running`. Negative after a bound was lowered or a run
    resumed from an older version: then nothing starts until training catches up.
    """
    capacity = (version + staleness + 1) * batch - (accepted + running)
    return capacity if max_in_flight is None else min(capacity, max_in_flight - running)


class Dispatcher:
    """Decides what starts, is retried or waits, and accounts for every sample exactly once.

    `plan` maps a group's number to its size and environment; `caps` bound the samples in flight of single
    environments. The caller reports `finish` for every sample, `drop` or `trained` for every complete group,
    and `advance` for every new policy version.
    """

    def __init__(
        self,
        config: RolloutConfig,
        plan: Callable[[int], GroupPlan],
        caps: Mapping[str, int] | None = None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._caps = dict(caps or {})
        self.version = 0
        self.cursor = 0
        self.counter = config.max_in_flight
        self.trained_groups = 0
        self.duplicates = 0
        self._groups: dict[int, OpenGroup] = {}
        self._waiting: dict[tuple[int, int], None] = {}
        self._deferred: list[int] = []
        self._breakers: dict[str, CircuitBreaker] = {}
        self._news: list[str] = []
        self._live: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._ledger = Ledger()

    @property
    def capacity(self) -> int:
        """How many more groups the staleness bound lets start now."""
        return self._config.extra_groups + staleness_capacity(
            version=self.version,
            staleness=self._config.staleness,
            batch=self._config.groups_per_step,
            accepted=self.trained_groups,
            running=len(self._groups),
        )

    @property
    def in_flight(self) -> int:
        """Samples that started (or wait for a retry) and did not end."""
        return self._live.total()

    def running_in(self, environment: str) -> int:
        """Samples of one environment that were handed out and did not end."""
        return self._running[environment]

    def start(self, now: float = 0.0) -> list[SampleId]:
        """Returns the samples to run now, retries first; each is to be reported with `finish`."""
        started = self._start_waiting(now)
        while (group := self._next_group(now)) is not None:
            self._open(group)
            started += [self._run(group, index) for index in self._probe_or_all(group)]
        return started

    def finish(self, sample: SampleId, failure: str = "", now: float = 0.0) -> Ending:
        """Reports the end of a sample; `failure` names why it has no score (an infrastructure fault)."""
        member = self._member(sample)
        if member is None or member.state is not MemberState.RUNNING or member.attempt != sample.attempt:
            self.duplicates += 1
            return Ending.DUPLICATE
        environment = self._groups[sample.group].environment
        self._running[environment] -= 1
        if not failure:
            self._succeeded(environment)
            member.state = MemberState.FINISHED
        else:
            self._failed(environment, failure, now)
            if member.attempt < self._config.retries:
                member.attempt += 1
                member.state = MemberState.WAITING
                self._waiting[sample.group, sample.index] = None
                return Ending.RETRY
            member.state, member.why = MemberState.FAILED, failure
        self._live[environment] -= 1
        self.counter += 1
        return Ending.FINAL

    def trained(self, groups: Iterable[int]) -> None:
        """Books complete groups as trained."""
        for group in groups:
            self._ledger.close(self._close(group).members)
            self.trained_groups += 1

    def drop(self, group: int, why: str) -> None:
        """Books a complete group as filtered for the reason `why`; its place becomes free."""
        self._ledger.close(self._close(group).members, why)

    def advance(self, version: int) -> None:
        """Notes the policy version that new samples start under."""
        if version < self.version:
            raise DispatchError(
                f"policy version {version} is older than {self.version}; restore a state to go back"
            )
        self.version = version

    def set_limits(self, max_in_flight: int, caps: Mapping[str, int]) -> None:
        """Changes how many samples may be in flight, of all and of single environments; what runs goes on."""
        self.counter, self._caps = max_in_flight - self.in_flight, dict(caps)

    def account(self) -> Account:
        """Returns where every dispatched sample is."""
        return self._ledger.account(sum(len(group.members) for group in self._groups.values()))

    def open_groups(self) -> list[int]:
        """Numbers of the groups that were started and neither trained nor dropped, in order of start."""
        return list(self._groups)

    def open_environments(self) -> list[str]:
        """Environments whose circuit breaker is open, sorted."""
        return sorted(name for name, breaker in self._breakers.items() if breaker.is_open)

    def take_news(self) -> list[str]:
        """Returns what happened to circuit breakers since the last call, in words."""
        news, self._news = self._news, []
        return news

    def reconcile(self, logged: Iterable[SampleId]) -> list[SampleId]:
        """Squares a restored state with what a token log holds; returns the log's entries without use.

        Groups beyond the cursor that the log knows are opened, and every group before them, as groups start
        in order. The newest logged attempt of a sample counts as running: it is continued, or its result is
        reported, by whoever reads the log. All other samples that had started are handed out by `start`
        again.
        """
        newest: dict[tuple[int, int], SampleId] = {}
        useless: list[SampleId] = []
        for sample in sorted(logged):
            self._open_until(sample.group)
            member = self._member(sample)
            if member is None or member.ended or sample.attempt < member.attempt:
                useless.append(sample)
                continue
            if (older := newest.get((sample.group, sample.index))) is not None:
                useless.append(older)
            newest[sample.group, sample.index] = sample
            if member.state is not MemberState.RUNNING:
                self._running[self._groups[sample.group].environment] += 1
            member.state, member.attempt = MemberState.RUNNING, sample.attempt
            self._waiting.pop((sample.group, sample.index), None)
        return sorted(useless)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as JSON: cursor, counter, open groups, accounts, breakers."""
        return {
            "format": _FORMAT,
            "version": self.version,
            "cursor": self.cursor,
            "counter": self.counter,
            "trained_groups": self.trained_groups,
            "duplicates": self.duplicates,
            "deferred": list(self._deferred),
            "groups": {str(number): group.state_dict() for number, group in self._groups.items()},
            "ledger": self._ledger.state_dict(),
            "breakers": {name: breaker.state_dict() for name, breaker in self._breakers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; samples that were running wait to be handed out again.

        A changed `max_in_flight` takes effect as ended samples are replaced.
        """
        if state["format"] != _FORMAT:
            raise DispatchError(f"dispatcher state of format {state['format']}; this version reads {_FORMAT}")
        self.version, self.cursor = state["version"], state["cursor"]
        self.trained_groups, self.duplicates = state["trained_groups"], state["duplicates"]
        self._deferred = list(state["deferred"])
        self._groups = {int(number): OpenGroup.from_state(group) for number, group in state["groups"].items()}
        self._waiting = {
            (number, index): None
            for number, group in self._groups.items()
            for index, member in enumerate(group.members)
            if member.state is MemberState.WAITING
        }
        self._running.clear()
        self._live.clear()
        for group in self._groups.values():
            self._live[group.environment] += sum(not member.ended for member in group.members)
        self._ledger.load_state_dict(state["ledger"])
        self._breakers = {}
        for name, breaker in state["breakers"].items():
            self._breaker(name).load_state_dict(breaker)
        self.counter = self._config.max_in_flight - self.in_flight

    def _start_waiting(self, now: float) -> list[SampleId]:
        started: list[SampleId] = []
        for number, index in list(self._waiting):
            environment = self._groups[number].environment
            cap = self._caps.get(environment)
            fits = cap is None or self._running[environment] < cap
            if fits and self._breaker(environment).may_start(now):
                self._starts(environment)
                started.append(self._run(number, index))
        if not self._waiting:
            self._waiting.clear()  # a dict keeps the places of what left it, and every later look passes them
        return started

    def _probe_or_all(self, group: int) -> range:
        """The members of a new group to run now: all, or one when its environment is only probed."""
        plan = self._groups[group]
        return range(1 if self._starts(plan.environment) else len(plan.members))

    def _next_group(self, now: float) -> int | None:
        """The next group that may start, or None; those of a full or resting environment are put off."""
        if self.capacity <= 0:
            return None
        for group in self._deferred:
            if self._welcome(group, now):
                return group if self._affordable(group) else None
        while len(self._deferred) < self._config.groups_per_step and self._affordable(self.cursor):
            if self._welcome(self.cursor, now):
                return self.cursor
            self._deferred.append(self.cursor)
            self.cursor += 1
        return None

    def _welcome(self, group: int, now: float) -> bool:
        """Whether a group's environment has room for it and does not rest."""
        plan = self._plan(group)
        cap = self._caps.get(plan.environment)
        if cap is not None and cap < plan.size:
            raise RolloutConfigError(
                f"a group of {plan.size} samples never fits under env.mixture.{plan.environment}."
                f"max_in_flight={cap}; set it to at least {plan.size} or make algorithm.group_size smaller"
            )
        full = cap is not None and self._live[plan.environment] + plan.size > cap
        return not full and self._breaker(plan.environment).may_start(now)

    def _affordable(self, group: int) -> bool:
        size = self._plan(group).size
        self._config.check_group_size(size)
        return self.counter >= size

    def _open(self, group: int) -> None:
        plan = self._plan(group)
        self._groups[group] = OpenGroup(plan.environment, self.version, [Member() for _ in range(plan.size)])
        self._waiting.update(dict.fromkeys((group, index) for index in range(plan.size)))
        self._ledger.dispatched += plan.size
        self._live[plan.environment] += plan.size
        self.counter -= plan.size
        if group == self.cursor:
            self.cursor += 1
        else:
            self._deferred.remove(group)

    def _open_until(self, group: int) -> None:
        if group in self._deferred:
            self._open(group)
        while self.cursor <= group:
            self._open(self.cursor)

    def _run(self, group: int, index: int) -> SampleId:
        member = self._groups[group].members[index]
        member.state = MemberState.RUNNING
        self._running[self._groups[group].environment] += 1
        del self._waiting[group, index]
        return SampleId(group, index, member.attempt)

    def _member(self, sample: SampleId) -> Member | None:
        group = self._groups.get(sample.group)
        return group.members[sample.index] if group and sample.index < len(group.members) else None

    def _close(self, group: int) -> OpenGroup:
        found = self._groups.get(group)
        if found is None or not found.complete:
            state = "is not open" if found is None else "still has running members"
            raise DispatchError(f"group {group} {state}: it can be neither trained nor dropped")
        return self._groups.pop(group)

    def _starts(self, environment: str) -> bool:
        probes = self._breaker(environment).started()
        if probes:
            self._news.append(f"environment {environment} rested (half-open): one sample probes it")
        return probes

    def _succeeded(self, environment: str) -> None:
        if self._breaker(environment).succeeded():
            self._news.append(f"environment {environment} works again: its circuit breaker is closed")

    def _failed(self, environment: str, failure: str, now: float) -> None:
        breaker = self._breaker(environment)
        if breaker.failed(now):
            self._news.append(
                f"environment {environment} failed {breaker.in_a_row} times in a row, last with {failure}: "
                f"its circuit breaker is open, nothing starts there for {self._config.breaker_rest_s:g} s"
            )

    def _breaker(self, environment: str) -> CircuitBreaker:
        if environment not in self._breakers:
            self._breakers[environment] = CircuitBreaker(
                self._config.breaker_failures, self._config.breaker_rest_s
            )
        return self._breakers[environment]
