"""Before the trainer: trajectories become groups, groups become batches, staleness is checked again.

Dispatch bounds how old work may get; a sample that ran over several updates may still hold tokens of an older
policy than the bound allows. Here they are masked (the batch's `min_version`) or their group is dropped, and
every drop has a reason. Groups leave in the order in which they became complete; in the first steps, if asked
for, in the order in which they began, because what ends first is short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envs.types import Group, Score, Status, Task, Trajectory
from rewards.length import LengthPenaltyConfig
from rewards.length import apply as apply_length_penalty
from rl.rollout.codec import (
    group_from_json,
    group_to_json,
    task_from_json,
    task_to_json,
    trajectory_from_json,
    trajectory_to_json,
)
from rl.rollout.config import RolloutConfig
from rl.rollout.filters import why_filtered

_FORMAT = 2
_READS = (1, 2)


class BufferError(ValueError):
    """A trajectory that fits no announced group, or a state of another format."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A complete group that will not be trained: its number, the reason, and what it was, for statistics."""

    id: int
    reason: str
    group: Group


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimiser step at policy `version`.

    Tokens that a version below `min_version` sampled carry no loss; `masked_tokens` of `sampled_tokens` are
    such.
    """

    groups: tuple[Group, ...]
    version: int
    min_version: int
    sampled_tokens: int
    masked_tokens: int


@dataclass(slots=True)
class _Gathering:
    task: Task
    effort: int
    scaffold: str
    size: int
    members: dict[int, Trajectory] = field(default_factory=dict)

    def group(self, number: int) -> Group:
        members = tuple(self.members[index] for index in sorted(self.members))
        return Group(number, self.task, self.effort, self.scaffold, members)


def outcome(score: Score) -> float:
    """The outcome part of a score, without the effort's length penalty; filters look at nothing else."""
    return score.parts.get("outcome", score.value)


def outcomes(group: Group) -> list[float]:
    """The outcomes of a group's scored members."""
    return [outcome(t.score) for t in group.trajectories if isinstance(t.score, Score)]


def count_older(trajectories: Sequence[Trajectory], version: int) -> int:
    """The number of sampled tokens of scored members that a policy older than `version` sampled."""
    return sum(
        token_version < version
        for trajectory in trajectories
        if isinstance(trajectory.score, Score)
        for turn in trajectory.turns
        for token_version in turn.policy_versions
    )


class Buffer:
    """Collects trajectories into groups and hands out batches of `groups_per_step` groups.

    With `length` the effort's length penalty is added to the scores of a batch as it leaves; filters and
    counts see the outcome only. A group is announced with `open`; each member arrives once with `add`,
    scored or finally failed. `counts` has the groups so far: complete, all_good, all_bad, mixed (by outcome
    above or at most 0), zero_variance, dropped reasons, and filter_exhausted: kept although a filter was
    against it, as it had dropped its share for that step.
    """

    def __init__(self, config: RolloutConfig, length: LengthPenaltyConfig | None = None) -> None:
        self._config = config
        self._length = length
        self._gathering: dict[int, _Gathering] = {}
        self._ready: list[Group] = []
        self._dropped: list[Dropped] = []
        self._filtered = 0
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """The number of complete groups that wait for training."""
        return len(self._ready)

    def open(self, group: int, task: Task, effort: int, scaffold: str, size: int) -> None:
        """Announces a group; announcing it again (after a resume) changes nothing."""
        complete = (*self._ready, *self._dropped)
        if group not in self._gathering and all(known.id != group for known in complete):
            self._gathering[group] = _Gathering(task, effort, scaffold, size)

    def add(self, trajectory: Trajectory) -> None:
        """Takes the final trajectory of one member.

        Raises:
            BufferError: Its group was not announced, or it has this member already.
        """
        key = trajectory.key
        gathering = self._gathering.get(key.group)
        if gathering is None or not 0 <= key.index < gathering.size or key.index in gathering.members:
            raise BufferError(
                f"member {key.index} of group {key.group} is not expected: announce the group with open(), "
                "and add only what Dispatcher.finish called final"
            )
        gathering.members[key.index] = trajectory
        if len(gathering.members) == gathering.size:
            del self._gathering[key.group]
            self._completed(gathering.group(key.group))

    def take(self, version: int) -> Batch | None:
        """Returns the next batch for the step that trains policy `version`, or None while there is none.

        Groups that are too old to train on are dropped on the way (reason `stale`).
        """
        oldest = version - self._config.staleness
        for group in [group for group in self._ready if self._too_old(group, oldest)]:
            self._ready.remove(group)
            self._drop(group, "stale")
        taken = self._next(version)
        if len(taken) < self._config.groups_per_step:
            return None
        leaving = {group.id for group in taken}
        self._ready = [group for group in self._ready if group.id not in leaving]
        self._filtered = 0
        groups = tuple(self._with_length(group, version) for group in taken)
        masked = sum(count_older(group.trajectories, oldest) for group in groups)
        total = sum(_scored_tokens(group.trajectories) for group in groups)
        return Batch(groups, version, oldest, total, masked)

    def take_dropped(self) -> list[Dropped]:
        """Returns the groups dropped since the last call; report each to the dispatcher."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def state_dict(self) -> dict[str, Any]:
        """Everything it holds, as JSON."""
        gathering = {
            str(number): {
                "task": task_to_json(g.task),
                "effort": g.effort,
                "scaffold": g.scaffold,
                "size": g.size,
                "members": [trajectory_to_json(member) for member in g.members.values()],
            }
            for number, g in self._gathering.items()
        }
        dropped = [[drop.reason, group_to_json(drop.group)] for drop in self._dropped]
        ready = [group_to_json(group) for group in self._ready]
        counts = dict(self.counts)
        return {
            "format": _FORMAT,
            "gathering": gathering,
            "ready": ready,
            "dropped": dropped,
            "filtered": self._filtered,
            "counts": counts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        if state["format"] not in _READS:
            raise BufferError(f"buffer state of format {state['format']}; this version reads {_READS}")
        self._gathering = {}
        for number, g in state["gathering"].items():
            gathering = _Gathering(task_from_json(g["task"]), g["effort"], g["scaffold"], g["size"])
            members = [trajectory_from_json(member) for member in g["members"]]
            gathering.members = {member.key.index: member for member in members}
            self._gathering[int(number)] = gathering
        self._ready = [group_from_json(group) for group in state["ready"]]
        groups = [(reason, group_from_json(group)) for reason, group in state["dropped"]]
        self._dropped = [Dropped(group.id, reason, group) for reason, group in groups]
        self._filtered = 0 if state["format"] == 1 else state["filtered"]
        self.counts = Counter(state["counts"])

    def _next(self, version: int) -> list[Group]:
        """The groups to train next, too few when some must still be waited for."""
        size = self._config.groups_per_step
        if version >= self._config.hold_back_steps:
            return self._ready[:size]
        begun = sorted([*self._gathering, *(group.id for group in self._ready)])[:size]
        return sorted((group for group in self._ready if group.id in begun), key=lambda group: group.id)

    def _completed(self, group: Group) -> None:
        values = outcomes(group)
        self.counts["complete"] += 1
        if len(values) < self._config.min_valid:
            self._drop(group, "too_few_valid")
            return
        good = sum(value > 0 for value in values)
        self.counts["all_good" if good == len(values) else "mixed" if good else "all_bad"] += 1
        if len(values) > 1 and min(values) == max(values):
            self.counts["zero_variance"] += 1
        if why := self._unwanted(values):
            self._drop(group, why)
            return
        self._ready.append(group)

    def _unwanted(self, values: Sequence[float]) -> str:
        """Why a filter drops a group with these outcomes; empty when it is kept."""
        config = self._config.filter
        why = "" if config is None else why_filtered(config, values)
        if config is None or not why:
            return ""
        if self._filtered >= config.attempts * self._config.groups_per_step:
            self.counts["filter_exhausted"] += 1
            return ""
        self._filtered += 1
        return why

    def _with_length(self, group: Group, version: int) -> Group:
        if self._length is None:
            return group
        members = group.trajectories
        scores = apply_length_penalty(
            self._length,
            [member.score for member in members],
            effort=group.effort,
            tokens=[member.sampled_tokens for member in members],
            truncated=[member.status is Status.TRUNCATED for member in members],
            step=version,
        )
        penalised = (replace(member, score=score) for member, score in zip(members, scores, strict=True))
        return replace(group, trajectories=tuple(penalised))

    def _too_old(self, group: Group, oldest: int) -> bool:
        older = count_older(group.trajectories, oldest)
        return older > 0 and (self._config.stale == "drop" or older == _scored_tokens(group.trajectories))

    def _drop(self, group: Group, reason: str) -> None:
        self.counts[f"dropped.{reason}"] += 1
        self._dropped.append(Dropped(group.id, reason, group))


def _scored_tokens(trajectories: Sequence[Trajectory]) -> int:
    return sum(t.sampled_tokens for t in trajectories if isinstance(t.score, Score))
