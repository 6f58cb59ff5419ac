"""What a user may set about rollouts, checked once, with the change to make in every message."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

UnknownCommands = Literal["fail", "rerun_if_idempotent", "replay"]
"""What becomes of a command that was under way in a sandbox when the process that gave it died."""


class RolloutConfigError(ValueError):
    """A setting of the group `rollout` that cannot work: which, why, and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterConfig:
    """Which complete groups are worth a place in a batch (dynamic sampling), by their outcomes.

    A group is dropped when all its outcomes are equal (`zero_variance`), or when their mean lies below
    `min_outcome` or above `max_outcome`. For one optimiser step at most `attempts` x groups_per_step groups
    are dropped; after that, groups stay as they are, so that a step always comes. With `oversample` above 1
    that many times groups_per_step groups are begun at first, so that a step need not wait for another round;
    what is too many trains the next step.
    """

    zero_variance: bool = True
    min_outcome: float | None = None
    max_outcome: float | None = None
    attempts: int = 8
    oversample: float = 1.0

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            RolloutConfigError: A field is out of range, or nothing is filtered.
        """
        low, high = self.min_outcome, self.max_outcome
        _require("filter.attempts", self.attempts, self.attempts >= 1, "at least 1")
        in_range = 1 <= self.oversample <= 8
        _require("filter.oversample", self.oversample, in_range, "1 (none) to 8 times")
        if low is not None and high is not None:
            _require("filter.min_outcome", low, low <= high, f"at most filter.max_outcome={high}")
        if not self.zero_variance and low is None and high is None:
            raise RolloutConfigError(
                "rollout.filter filters nothing: set rollout.filter.zero_variance=true, "
                "rollout.filter.min_outcome or rollout.filter.max_outcome, or leave rollout.filter out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    """Who chooses the next task: a function of the pass rate of each task of a pool.

    `function` is a built-in name, `package.module:function`, or `file.py:function` (see
    `rl.rollout.curriculum`); the pool is the first `tasks` tasks of each environment's training split.
    """

    function: str
    tasks: int = 1024

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            RolloutConfigError: There is no function, or no task.
        """
        _require("curriculum.function", self.function, bool(self.function), "the name of a function")
        _require("curriculum.tasks", self.tasks, self.tasks >= 1, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """Settings of the token log.

    `flush_ms` bounds what a crash can cost in sampled tokens (0: every decode step is written at once);
    `fsync` also survives the loss of power. After `segment_bytes` a new file begins.
    """

    flush_ms: float = 50.0
    fsync: bool = False
    segment_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Settings of dispatch, episodes, token log and buffer.

    `max_in_flight` counts samples, `groups_per_step` groups; `staleness` is how many optimiser steps the
    weights that sampled a token may lag behind the weights that train on it (0: synchronous). `stale` says
    what becomes of a group with older tokens: `mask` trains on its fresh tokens only, `drop` drops it.
    `filter` drops groups by their outcomes, `curriculum` chooses tasks. In the first `hold_back_steps`
    optimiser steps groups are trained in the order in which they began: short samples, which end first, are
    held back until the long ones that began with them have ended.
    `retries` is the number of further attempts of a sample that failed for infrastructure. After
    `breaker_failures` failures in a row an environment rests for `breaker_rest_s`, then one sample probes
    it. A command that was under way in a sample's own sandbox when the
    process that gave it died has an unknown effect: `replay` makes the sandbox anew from its journal and runs
    the command there, `rerun_if_idempotent` runs it again only if it was marked so, `fail` never; where it
    does not run the sample fails for infrastructure. `kv_on_update` says what a new version of the weights
    does with the caches of samples in flight: `keep` goes on at once with keys of mixed versions, `recompute`
    computes them anew.
    """

    max_in_flight: int = 128
    groups_per_step: int = 16
    staleness: int = 1
    stale: Literal["mask", "drop"] = "mask"
    filter: FilterConfig | None = None
    curriculum: CurriculumConfig | None = None
    hold_back_steps: int = 0
    min_valid: int = 2
    retries: int = 2
    breaker_failures: int = 64
    breaker_rest_s: float = 30.0
    deadline_s: float = 600.0
    score_deadline_s: float = 60.0
    max_total_tokens: int = 4096
    pool_size: int = 2
    lag_alarm_s: float = 1.0
    wal: WalConfig = field(default_factory=WalConfig)
    unknown_commands: UnknownCommands = "replay"
    kv_on_update: Literal["keep", "recompute"] = "keep"

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            RolloutConfigError: A field is out of range.
        """
        for name in ("max_in_flight", "groups_per_step", "min_valid", "breaker_failures", "pool_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("staleness", "retries", "breaker_rest_s", "hold_back_steps"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("deadline_s", "score_deadline_s", "lag_alarm_s"):
            self._require(name, getattr(self, name) > 0, "greater than 0 seconds")
        self._require("max_total_tokens", self.max_total_tokens >= 2, "at least 2 (a prompt and one token)")
        _require("wal.flush_ms", self.wal.flush_ms, self.wal.flush_ms >= 0, "0 or more")
        size = self.wal.segment_bytes
        _require("wal.segment_bytes", size, size >= 4096, "at least 4096 bytes")
        policies = ("fail", "rerun_if_idempotent", "replay")
        self._require("unknown_commands", self.unknown_commands in policies, "one of " + ", ".join(policies))
        self._require("kv_on_update", self.kv_on_update in ("keep", "recompute"), "'keep' or 'recompute'")
        self._require("stale", self.stale in ("mask", "drop"), "'mask' or 'drop'")
        if self.hold_back_steps and self.staleness == 0:
            raise RolloutConfigError(
                f"rollout.hold_back_steps={self.hold_back_steps} has no effect under rollout.staleness=0, "
                "where every step waits for all of its groups; leave it out, or allow staleness"
            )

    @property
    def extra_groups(self) -> int:
        """Groups that may be begun beyond the staleness bound, because a filter will drop some."""
        factor = 1.0 if self.filter is None else self.filter.oversample
        return math.ceil(self.groups_per_step * (factor - 1.0))

    def check_group_size(self, size: int) -> None:
        """Refuses a group size that could never start or never be valid.

        Raises:
            RolloutConfigError: The group does not fit in flight, or has fewer members than `min_valid`.
        """
        if size > self.max_in_flight:
            raise RolloutConfigError(
                f"a group of {size} samples never fits under rollout.max_in_flight={self.max_in_flight}; "
                f"set rollout.max_in_flight to at least {size} or make algorithm.group_size smaller"
            )
        if size < self.min_valid:
            raise RolloutConfigError(
                f"groups of {size} can never have rollout.min_valid={self.min_valid} scored members; "
                "make algorithm.group_size larger, or set rollout.min_valid=1 with an advantage "
                "that needs no group"
            )

    def _require(self, name: str, holds: bool, what: str) -> None:
        _require(name, getattr(self, name), holds, what)


def _require(name: str, value: object, holds: bool, what: str) -> None:
    if not holds:
        raise RolloutConfigError(f"rollout.{name}={value!r}: set it to {what}")
