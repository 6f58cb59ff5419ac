"""From groups of trajectories to the samples of one step, with their batch-wide weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from envs.types import Group, Missing, Trajectory
from rl.algorithms import AlgorithmConfig
from rl.algorithms.advantages import compute
from rl.algorithms.aggregation import sequence_weights
from rl.trainers.choices import ReplayChoices
from rl.trainers.data import Sample, trajectory_samples


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step.

    Attributes:
        samples: what goes through the forward pass.
        weights: float64 [len(samples)], weight of each of a sample's token losses.
        fresh: bool [len(samples)]: all tokens of the trajectory were sampled by the present weights.
        advantages: float64, of the trajectories that have one.
        dropped: number of dropped groups by reason.
        trajectories: number of trajectories given.
    """

    samples: list[Sample]
    weights: np.ndarray
    fresh: np.ndarray
    advantages: np.ndarray
    dropped: Counter[str]
    trajectories: int

    def statistics(self) -> dict[str, float]:
        """What is known before the forward pass."""
        kept = self.advantages
        return {
            "adv.std": float(kept.std()) if len(kept) else 0.0,
            "adv.max": float(np.abs(kept).max()) if len(kept) else 0.0,
            "tokens.trained": float(sum(sample.trained_tokens for sample in self.samples)),
            "tokens": float(sum(len(sample) for sample in self.samples)),
            "trajectories": float(self.trajectories),
            "truncated": float(sum(sample.truncated for sample in self.samples)),
        }


def build_batch(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    max_tokens: int | None,
    version: int,
    min_version: int = 0,
    recovered_groups: int = 0,
    replay: ReplayChoices = "selections",
) -> Batch:
    """Computes advantages and turns what can be learned from into samples.

    Tokens of versions below `min_version` are not trained. Groups numbered below `recovered_groups` may hold
    tokens of weights that no longer exist and never count as fresh. `replay` names the choices to repeat.

    Raises:
        NonFiniteAdvantageError: A reward or advantage is not a number; names the trajectories.
        ValueError: A token was sampled by a version that does not exist yet.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    owners = [number for number, group in enumerate(groups) for _ in group.trajectories]
    rewards = [_reward(trajectory, algorithm) for trajectory in trajectories]
    result = compute(
        algorithm,
        rewards,
        groups=owners,
        lengths=[t.sampled_tokens for t in trajectories],
        ids=[str(t.key) for t in trajectories],
    )
    dropped = result.dropped + Counter(empty=sum(not group.trajectories for group in groups))
    candidates: list[tuple[Sample, int, bool]] = []
    for trajectory, owner, value, keep in zip(trajectories, owners, result.values, result.keep, strict=True):
        if keep:
            fresh = trajectory.key.group >= recovered_groups and _is_fresh(trajectory, version)
            samples = trajectory_samples(trajectory, float(value), max_tokens=max_tokens, replay=replay)
            candidates += [
                (s, owner, fresh) for sample in samples if (s := _without_old(sample, min_version))
            ]
    weights = sequence_weights(
        algorithm.aggregation,
        [sample.trained_tokens for sample, _, _ in candidates],
        [sample.response for sample, _, _ in candidates],
        [owner for _, owner, _ in candidates],
        max_length=algorithm.max_length,
    )
    silent = set() if algorithm.regularised else _silent(owners, result.values, result.keep)
    dropped["zero_advantage"] += len(silent)
    kept = [i for i, (_, owner, _) in enumerate(candidates) if owner not in silent]
    return Batch(
        [candidates[i][0] for i in kept],
        weights[kept],
        np.array([candidates[i][2] for i in kept], dtype=bool),
        result.values[result.keep],
        dropped,
        len(trajectories),
    )


def _reward(trajectory: Trajectory, algorithm: AlgorithmConfig) -> float | None:
    if isinstance(trajectory.score, Missing):
        return None
    overlong = algorithm.overlong
    return trajectory.score.value + (overlong.value(trajectory.sampled_tokens) if overlong else 0.0)


def _without_old(sample: Sample, min_version: int) -> Sample | None:
    mask = sample.loss_mask & (sample.policy_version >= min_version)
    if not mask.any():
        return None
    return sample if mask.sum() == sample.trained_tokens else replace(sample, loss_mask=mask)


def _silent(owners: Sequence[int], values: np.ndarray, keep: np.ndarray) -> set[int]:
    """Groups that have scores and whose advantages are all zero."""
    owner = np.asarray(owners, dtype=np.int64)
    return {int(group) for group in np.unique(owner[keep]) if not values[keep & (owner == group)].any()}


def _is_fresh(trajectory: Trajectory, version: int) -> bool:
    versions = trajectory.policy_versions
    if versions and versions[-1] > version:
        raise ValueError(
            f"{trajectory.key} holds tokens of policy version {versions[-1]}, but the trainer is at version "
            f"{version}; a checkpoint was resumed with rollouts that are newer than it: drop them"
        )
    return versions == (version,)
