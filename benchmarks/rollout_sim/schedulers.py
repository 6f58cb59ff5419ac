"""The rules: each says which groups start when, and nothing else.

The others keep their own books in a few lines; ours is the product's `rl.rollout.dispatch.Dispatcher` itself.
All rules but the barriers let samples run on through weight updates, all mask tokens beyond the same
staleness bound, and all have the same engines and the same limit on live samples. Sources of the rules:
SkyRL's fully asynchronous trainer and slime's (a worker or permit holds its group until the slowest member
ends), AReaL (arXiv 2505.24298, `StalenessManager.get_capacity`, where a permit is an episode, i.e. a group),
and prompt-level dispatch as DeepSeek-V4.1 describes what it left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from benchmarks.rollout_sim.costs import Costs
from rl.rollout.config import RolloutConfig
from rl.rollout.dispatch import Dispatcher, Ending, GroupPlan, SampleId, staleness_capacity


class Scheduler(Protocol):
    """What the simulation asks and tells a rule. Versions count optimiser steps."""

    name: str
    restarts: bool
    holds_weights: bool

    def start(self, now: float) -> list[SampleId]:
        """Returns the samples to start now."""
        ...

    def finish(self, sample: SampleId, failure: str, now: float) -> bool:
        """Takes a sample's end; whether it is final (False: the sample will be started again)."""
        ...

    def completed(self, group: int) -> None:
        """Notes that all members of a group ended."""
        ...

    def taken(self, groups: list[int]) -> None:
        """Notes that the trainer takes a batch."""
        ...

    def trained(self, groups: list[int], version: int) -> None:
        """Notes that the trainer finished a batch and has weights of this version."""
        ...


class _Groups:
    """The books of a rule that starts whole groups and runs failed samples again."""

    restarts = False
    holds_weights = False

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.version = self.cursor = 0
        self.open = self.ready = self.training = self.done = 0
        self._again: list[SampleId] = []

    def start(self, now: float) -> list[SampleId]:
        """Starts what `wanted` allows, retries first."""
        again, self._again = self._again, []
        for _ in range(max(0, self.wanted())):
            again += [SampleId(self.cursor, index) for index in range(self.costs.group_size)]
            self.cursor += 1
            self.open += 1
        return again

    def finish(self, sample: SampleId, failure: str, now: float) -> bool:
        """A failed sample is started again."""
        if failure:
            self._again.append(SampleId(sample.group, sample.index, sample.attempt + 1))
        return not failure

    def completed(self, group: int) -> None:
        """A group waits for the trainer."""
        self.open -= 1
        self.ready += 1

    def taken(self, groups: list[int]) -> None:
        """A batch moves from the buffer to the trainer."""
        self.ready -= len(groups)
        self.training += len(groups)

    def trained(self, groups: list[int], version: int) -> None:
        """A batch is done."""
        self.training -= len(groups)
        self.done += len(groups)
        self.version = version

    @property
    def permits(self) -> int:
        """Groups whose members all fit under the limit on live samples."""
        return self.costs.in_flight // self.costs.group_size

    def wanted(self) -> int:
        """How many groups to start now."""
        raise NotImplementedError


class Barrier(_Groups):
    """Synchronous: a batch starts when the batch before is trained and its weights are published."""

    name = "barrier"

    def wanted(self) -> int:
        """What is left of the batch of this version, as places are free."""
        return min(self.permits - self.open, (self.version + 1) * self.costs.groups_per_step - self.cursor)


class OneStepOff(_Groups):
    """The next batch is sampled while one trains; weights change between batches only."""

    name = "one step off"
    holds_weights = True

    def wanted(self) -> int:
        """What is left of the batch after the one that the trainer took last, as places are free."""
        limit = self.done + self.training + self.costs.groups_per_step
        return min(self.permits - self.open, limit - self.cursor)


class GroupAsync(_Groups):
    """As many workers as groups fit; each runs a group to its end, while (S + step) x B allows (SkyRL)."""

    name = "group async"

    def wanted(self) -> int:
        """Free workers, at most what the bound with steps counted from 1 leaves."""
        accepted = self.done + self.training + self.ready
        limit = (self.costs.staleness + self.version + 1) * self.costs.groups_per_step
        return min(self.permits - self.open, limit - (accepted + self.open))


class Areal(_Groups):
    """AReaL: min(max(1, C) - running, (eta + version + 1) x max(1, B) - (accepted + running)).

    Unlike the group workers it has no fixed set of tasks, but a permit is an episode there too: a group.
    """

    name = "areal"

    def wanted(self) -> int:
        """The capacity."""
        return staleness_capacity(
            version=self.version,
            staleness=self.costs.staleness,
            batch=self.costs.groups_per_step,
            accepted=self.done + self.training + self.ready,
            running=self.open,
            max_in_flight=self.permits,
        )


class PromptLevel(_Groups):
    """A new prompt for every finished group, without a bound where samples start."""

    name = "prompt level"

    def wanted(self) -> int:
        """Places of finished groups."""
        return self.permits - self.open


class Trajectories(Areal):
    """For reference: AReaL's capacity counted in samples, members started one by one (as in prime-rl)."""

    name = "per-sample permits"

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self._members: list[SampleId] = []
        self._live = 0

    def start(self, now: float) -> list[SampleId]:
        """Starts members while places for single samples are free."""
        started, self._again = self._again, []
        while self._live < self.costs.in_flight and (self._members or self.wanted() > 0):
            if not self._members:
                size = self.costs.group_size
                self._members = [SampleId(self.cursor, index) for index in reversed(range(size))]
                self.cursor += 1
                self.open += 1
            started.append(self._members.pop())
            self._live += 1
        return started

    def finish(self, sample: SampleId, failure: str, now: float) -> bool:
        """The place of an ended sample is free at once."""
        final = super().finish(sample, failure, now)
        self._live -= final
        return final

    def wanted(self) -> int:
        """The staleness bound alone; places are counted in samples."""
        accepted = self.done + self.training + self.ready
        limit = (self.costs.staleness + self.version + 1) * self.costs.groups_per_step
        return limit - (accepted + self.open)


class Ours:
    """Sample-level dispatch by the product's own dispatcher; interrupted samples go on where they were."""

    name = "ours"
    restarts = False
    holds_weights = False

    def __init__(self, costs: Costs) -> None:
        config = RolloutConfig(
            max_in_flight=costs.in_flight,
            groups_per_step=costs.groups_per_step,
            staleness=costs.staleness,
            min_valid=1,
            retries=1_000,
            breaker_failures=1_000_000,
        )
        plan = GroupPlan(costs.group_size, "simulated")
        self.dispatcher = Dispatcher(config, lambda _: plan)

    def start(self, now: float) -> list[SampleId]:
        """Asks the dispatcher."""
        return self.dispatcher.start(now)

    def finish(self, sample: SampleId, failure: str, now: float) -> bool:
        """Tells the dispatcher."""
        ending = self.dispatcher.finish(sample, failure, now)
        assert ending is not Ending.DUPLICATE, f"{sample} was reported twice"
        return ending is Ending.FINAL

    def completed(self, group: int) -> None:
        """The dispatcher knows from the members."""

    def taken(self, groups: list[int]) -> None:
        """The dispatcher counts a group until it is trained."""

    def trained(self, groups: Iterable[int], version: int) -> None:
        """Tells the dispatcher."""
        self.dispatcher.trained(groups)
        self.dispatcher.advance(version)


class OursRestarting(Ours):
    """Ablation: an update aborts every request, and its sample begins anew from nothing."""

    name = "ours, restart"
    restarts = True


RULES: dict[str, Callable[[Costs], Scheduler]] = {
    rule.name: rule
    for rule in (Barrier, OneStepOff, GroupAsync, Areal, PromptLevel, Ours, OursRestarting, Trajectories)
}
