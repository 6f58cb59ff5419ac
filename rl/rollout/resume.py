"""How a resumed run squares its checkpoint with the token log of a generator."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from envs.types import Trajectory, TrajectoryKey
from rl.rollout.dispatch import Dispatcher, SampleId
from rl.rollout.frames import Damage


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a generator found in its log: whole results, and samples that it can go on with (by key).

    `lost_tokens` lay behind damage and will be sampled again; `damage` says what could not be read.
    """

    finished: tuple[Trajectory, ...]
    unfinished: tuple[TrajectoryKey, ...]
    lost_tokens: int
    damage: Damage

    def beyond(self, cursor: int) -> list[TrajectoryKey]:
        """The samples of groups from number `cursor` on, by group."""
        keys = (*(t.key for t in self.finished), *self.unfinished)
        return sorted((key for key in keys if key.group >= cursor), key=lambda key: key.group)

    def without(self, keys: Collection[TrajectoryKey]) -> Recovered:
        """The same without some samples."""
        finished = tuple(t for t in self.finished if t.key not in keys)
        return replace(self, finished=finished, unfinished=tuple(k for k in self.unfinished if k not in keys))


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What to do with it: `receive` as if just collected, `resubmit` to go on, `forget` as consumed.

    `groups` are all open groups; announce each to the buffer before anything is received.
    """

    receive: tuple[Trajectory, ...]
    resubmit: tuple[TrajectoryKey, ...]
    forget: tuple[TrajectoryKey, ...]
    groups: tuple[int, ...]


def sample_id(key: TrajectoryKey) -> SampleId:
    """The dispatcher's name of a sample."""
    return SampleId(key.group, key.index, key.attempt)


def plan_resume(dispatcher: Dispatcher, recovered: Sequence[Recovered]) -> ResumePlan:
    """Reconciles a restored dispatcher with the logs of all generators and says what becomes of each sample.

    Samples that had started and are in no log are handed out again by the dispatcher's next `start`.
    """
    finished = {sample_id(t.key): t for part in recovered for t in part.finished}
    unfinished = {sample_id(key): key for part in recovered for key in part.unfinished}
    useless = set(dispatcher.reconcile([*finished, *unfinished]))
    return ResumePlan(
        receive=tuple(t for sample, t in sorted(finished.items()) if sample not in useless),
        resubmit=tuple(key for sample, key in sorted(unfinished.items()) if sample not in useless),
        forget=tuple(finished[s].key if s in finished else unfinished[s] for s in sorted(useless)),
        groups=tuple(dispatcher.open_groups()),
    )
