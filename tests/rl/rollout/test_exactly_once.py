"""Dispatcher, buffer and mixture together: every dispatched sample ends in exactly one place."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from envs.types import (
    Boundary,
    FinishReason,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from rl.rollout.buffer import Buffer, count_older
from rl.rollout.config import FilterConfig, RolloutConfig
from rl.rollout.dispatch import Dispatcher, Ending, GroupPlan, SampleId
from rl.rollout.mixture import Interleave

TASK = Task("t", (Message(Role.USER, "?"),))
CAPS = {"slow": 4}


@dataclass
class World:
    """A run without engine or clock: what the controller does, driven by chance."""

    config: RolloutConfig
    rng: random.Random
    outage: float
    order: Interleave = field(default_factory=lambda: Interleave({"fast": 2, "slow": 1}))
    running: dict[SampleId, int] = field(default_factory=dict)
    fate: dict[tuple[int, int], str] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.dispatcher, self.buffer = self.fresh()

    def fresh(self) -> tuple[Dispatcher, Buffer]:
        return Dispatcher(self.config, self.plan, CAPS), Buffer(self.config)

    def plan(self, group: int) -> GroupPlan:
        return GroupPlan(2 + group % 2, self.order.at(group)[0])

    def step(self) -> None:
        self.now += 1.0
        self.settle()
        for sample in self.dispatcher.start(self.now):
            self.buffer.open(sample.group, TASK, 50, "loop", self.plan(sample.group).size)
            self.running[sample] = self.dispatcher.version
            for index in range(self.plan(sample.group).size):
                self.fate.setdefault((sample.group, index), "carried")
        for name, cap in CAPS.items():
            in_flight = sum(self.plan(s.group).environment == name for s in self.running)
            assert in_flight == self.dispatcher.running_in(name) <= cap
        for sample in self.rng.sample(sorted(self.running), min(len(self.running), 2)):
            self.end(sample)
        if self.rng.random() < 0.6 and (batch := self.buffer.take(self.dispatcher.version)):
            for group in batch.groups:
                assert count_older(group.trajectories, batch.min_version) <= batch.masked_tokens
                self.book(group.id, "trained")
            self.dispatcher.trained(group.id for group in batch.groups)
            self.dispatcher.advance(batch.version + 1)

    def settle(self) -> None:
        for drop in self.buffer.take_dropped():
            self.dispatcher.drop(drop.id, drop.reason)
            self.book(drop.id, f"filtered {drop.reason}")

    def end(self, sample: SampleId) -> None:
        version = self.running.pop(sample)
        fails = self.rng.random() < self.outage and self.plan(sample.group).environment == "slow"
        ending = self.dispatcher.finish(sample, "sandbox.Died" if fails else "", self.now)
        assert ending is not Ending.DUPLICATE
        assert self.dispatcher.finish(sample, "", self.now) is Ending.DUPLICATE
        if ending is Ending.FINAL:
            self.fate[sample.group, sample.index] = "failed" if fails else "ended"
            self.buffer.add(self.trajectory(sample, fails, version))

    def trajectory(self, sample: SampleId, fails: bool, version: int) -> Trajectory:
        turn = Turn((1,), (2,), (-0.5,), (version,), FinishReason.STOP, Message(Role.ASSISTANT))
        score = Missing("died", Boundary.SANDBOX) if fails else Score(float(self.rng.random() < 0.5))
        key = TrajectoryKey("t", 50, "loop", sample.group, sample.index, sample.attempt)
        return Trajectory(key, ((turn,),), Status.FINISHED, StopReason.ANSWER, score)

    def book(self, group: int, fate: str) -> None:
        for index in range(self.plan(group).size):
            assert self.fate[group, index] in ("ended", "failed")
            if self.fate[group, index] == "ended":
                self.fate[group, index] = fate
            else:
                self.fate[group, index] = "booked as failed"

    def restart(self) -> None:
        state = json.loads(json.dumps([self.dispatcher.state_dict(), self.buffer.state_dict()]))
        self.dispatcher, self.buffer = self.fresh()
        self.dispatcher.load_state_dict(state[0])
        self.buffer.load_state_dict(state[1])
        kept = {s: v for s, v in self.running.items() if self.rng.random() < 0.5}
        assert self.dispatcher.reconcile(kept) == []
        self.running = kept

    def check(self) -> None:
        account, fates = self.dispatcher.account(), Counter(self.fate.values())
        assert account.balanced
        assert account.dispatched == len(self.fate)
        assert account.trained == fates["trained"]
        assert {f"filtered {why}": n for why, n in account.filtered.items()} == {
            fate: n for fate, n in fates.items() if fate.startswith("filtered")
        }
        assert sum(account.failed.values()) == fates["booked as failed"]
        assert account.carried == fates["carried"] + fates["ended"] + fates["failed"]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from((0.0, 0.3, 0.9)),
    st.sets(st.integers(0, 119), max_size=6),
)
def test_every_sample_is_trained_filtered_failed_or_carried_and_nothing_else(
    seed: int, staleness: int, filtering: bool, outage: float, restarts: set[int]
) -> None:
    config = RolloutConfig(
        max_in_flight=12,
        groups_per_step=3,
        staleness=staleness,
        stale="drop" if seed % 2 else "mask",
        filter=FilterConfig(oversample=1.5, attempts=1) if filtering else None,
        hold_back_steps=min(staleness, 2),
        retries=1,
        breaker_failures=4,
        breaker_rest_s=5.0,
    )
    world = World(config, random.Random(seed), outage)
    for number in range(120):
        if number in restarts:
            world.restart()
        world.step()
        world.check()
    assert world.dispatcher.version > 0
