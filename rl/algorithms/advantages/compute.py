"""From a batch's rewards to its advantages: what is missing or not a number never reaches the loss."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl.algorithms.advantages.registry import ADVANTAGES, Estimator, needs_group
from rl.algorithms.registry import AlgorithmError

if TYPE_CHECKING:
    from rl.algorithms.config import AlgorithmConfig


class NonFiniteAdvantageError(AlgorithmError):
    """A reward or an advantage is not a number; training must not go on."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of a batch of trajectories, aligned with the rewards that were given.

    Attributes:
        values: float64 [n]; 0 where `keep` is False.
        keep: bool [n]; False for a missing score and for the members of a dropped group.
        dropped: number of dropped groups by reason (`missing`: fewer than two members have a score).
    """

    values: np.ndarray
    keep: np.ndarray
    dropped: Counter[str] = field(default_factory=Counter)


def compute(
    config: AlgorithmConfig,
    rewards: Sequence[float | None],
    *,
    groups: Sequence[Hashable] | None = None,
    lengths: Sequence[int] | None = None,
    ids: Sequence[object] | None = None,
) -> Advantages:
    """Computes the advantage of each trajectory.

    A missing score (None or NaN) enters no statistic. A group with fewer than two scores left is dropped when
    the estimator compares; a group that was one trajectory from the start has advantage 0, and so has a group
    with equal rewards.

    Args:
        config: chooses the estimator and its settings.
        rewards: score of each trajectory, [n].
        groups: the draw each trajectory belongs to, [n]; default: all of one group.
        lengths: sampled tokens of each trajectory, [n]; needed by estimators that weigh by length.
        ids: what names a trajectory in an error, [n]; default: its index.

    Raises:
        NonFiniteAdvantageError: A reward is infinite, or an advantage is not finite; names the trajectories.
    """
    values = np.array([np.nan if r is None else r for r in rewards], dtype=np.float64)
    names = list(range(len(values)) if ids is None else ids)
    _require_finite(~np.isinf(values), values, names, "reward")
    owner = _group_indices(groups, len(values))
    estimator = ADVANTAGES.load(config.advantage)
    keep, dropped = _valid(values, owner, needs_group(estimator))
    weights = None if lengths is None else np.asarray(lengths, dtype=np.float64)
    out = np.zeros_like(values)
    out[keep] = _estimate(
        config, estimator, values[keep], owner[keep], None if weights is None else weights[keep]
    )
    _require_finite(np.isfinite(out), out, names, "advantage")
    return Advantages(out, keep, dropped)


def _valid(values: np.ndarray, owner: np.ndarray, compares: bool) -> tuple[np.ndarray, Counter[str]]:
    keep, dropped = ~np.isnan(values), Counter[str]()
    for group in np.unique(owner):
        members = owner == group
        scored = int(keep[members].sum())
        if scored == 0 or (compares and scored < 2 <= members.sum()):
            keep[members] = False
            dropped["missing"] += 1
    return keep, dropped


def _estimate(
    config: AlgorithmConfig,
    estimator: Estimator,
    values: np.ndarray,
    owner: np.ndarray,
    lengths: np.ndarray | None,
) -> np.ndarray:
    settings = config.settings_for(estimator)
    parameters = inspect.signature(estimator).parameters
    if "lengths" in parameters and lengths is None:
        raise AlgorithmError(f"advantage {config.advantage!r} weighs by length; pass the lengths")
    if "groups" in parameters:
        extra = {"lengths": lengths} if "lengths" in parameters else {}
        if not len(values):
            return values
        return _one_each(config, estimator(values, groups=owner, **extra, **settings), len(values))
    out = np.zeros_like(values)
    for group in np.unique(owner):
        members = owner == group
        if needs_group(estimator) and np.ptp(values[members]) == 0:
            continue
        extra = {"lengths": lengths[members]} if lengths is not None and "lengths" in parameters else {}
        found = estimator(values[members], **extra, **settings)
        out[members] = _one_each(config, found, int(members.sum()))
    return out


def _one_each(config: AlgorithmConfig, found: object, count: int) -> np.ndarray:
    """What an estimator returned, refused when it would be broadcast over the members."""
    shape = np.shape(found)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if shape != (count,):
        raise AlgorithmError(
            f"advantage {config.advantage!r} returned the shape {shape} for {count} rewards; it returns one "
            "number for each"
        )
    return np.asarray(found, dtype=np.float64)


def _group_indices(groups: Sequence[Hashable] | None, count: int) -> np.ndarray:
    if groups is None:
        return np.zeros(count, dtype=np.int64)
    if len(groups) != count:
        raise ValueError(f"{len(groups)} group ids for {count} rewards; there must be one each")
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(group, len(seen)) for group in groups], dtype=np.int64)


def _require_finite(ok: np.ndarray, values: np.ndarray, names: Sequence[object], what: str) -> None:
    bad = np.flatnonzero(~ok)
    if len(bad):
        listed = ", ".join(f"{names[i]} ({values[i]})" for i in bad[:8])
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        raise NonFiniteAdvantageError(
            f"the {what} of {listed}{more} is not finite; training stops before the weights are touched. "
            "Look at these samples' rewards and the advantage estimator"
        )
