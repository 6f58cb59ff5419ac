"""Names of metrics, and the figures of one training batch.

A name is `family/scope/metric.stat` (`rollout/all/reward.mean`, `train/kl.mismatch`). Each family has its own
step axis, so that a late evaluation or a resumed run never collides with another family's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from envs.types import Group, Missing, Score, Status, Trajectory
from rl.rollout.buffer import outcomes

FAMILIES: Mapping[str, str] = {
    "sft": "optimiser steps of the warm start",
    "train": "optimiser steps of reinforcement",
    "rollout": "version of the weights that the batch was trained on",
    "eval": "version of the weights that were evaluated",
    "draft": "optimiser steps of reinforcement, beside which the drafter is trained",
    "opd": "optimiser steps of distillation",
    "sys": "optimiser steps of reinforcement",
    "quant": "optimiser steps of reinforcement",
}


_MOST_EFFORTS = 8
"""With more efforts in a batch than that, its figures are by tens of them."""


class TrainingBatch(Protocol):
    """What `batch_metrics` looks at."""

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of the optimiser step."""
        ...

    @property
    def version(self) -> int:
        """The version of the weights that train on them."""
        ...

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        ...

    @property
    def masked_tokens(self) -> int:
        """Those of them that are too old to carry loss."""
        ...


class MetricNameError(ValueError):
    """A metric outside the scheme `family/scope/metric.stat`: which name, and the families there are."""


def split_families(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Sorts metrics by family.

    Raises:
        MetricNameError: A name has no known family.
    """
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        family, slash, rest = name.partition("/")
        if family not in FAMILIES or not slash or not rest:
            raise MetricNameError(
                f"metric {name!r} belongs to no family; a name is family/scope/metric.stat with one of "
                f"{', '.join(FAMILIES)}"
            )
        found.setdefault(family, {})[name] = float(value)
    return found


def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Returns the `rollout/all/` figures of a batch, and `rollout/effort.<b>/` ones when efforts differ.

    With many efforts these are tens of them: `rollout/effort.41-50/`.

    Means are over the trajectories that have a score; `n` and `n_valid` are their denominators. Idle
    shares and rates come from elsewhere.
    """
    everyone = [t for group in batch.groups for t in group.trajectories]
    metrics = _prefixed("rollout/all/", {**_figures(everyone), **_group_figures(batch.groups)})
    metrics["rollout/all/masked"] = batch.masked_tokens / max(batch.sampled_tokens, 1)
    efforts = sorted({group.effort for group in batch.groups})
    scopes: dict[str, list[Trajectory]] = {}
    for trajectory in everyone if len(efforts) > 1 else []:
        scopes.setdefault(_scope(trajectory.key.effort, len(efforts)), []).append(trajectory)
    for scope, members in scopes.items():
        metrics |= _prefixed(f"rollout/effort.{scope}/", _figures(members))
    return metrics


def _scope(effort: int, efforts: int) -> str:
    """What an effort counts as, among so many: itself, or its ten."""
    if efforts <= _MOST_EFFORTS:
        return str(effort)
    first = (effort - 1) // 10 * 10 + 1
    return f"{first}-{first + 9}"


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns mean, std, min, p50, p90 and max of values under `name`; nothing for no values."""
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    stats: Mapping[str, Callable[[np.ndarray], float]] = {
        "mean": lambda a: float(a.mean()),
        "std": lambda a: float(a.std()),
        "min": lambda a: float(a.min()),
        "p50": lambda a: float(np.quantile(a, 0.5)),
        "p90": lambda a: float(np.quantile(a, 0.9)),
        "max": lambda a: float(a.max()),
    }
    return {f"{name}.{stat}": function(array) for stat, function in stats.items()}


def _figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    scored = [(t, t.score) for t in trajectories if isinstance(t.score, Score)]
    valid = [t for t, _ in scored]
    parts = sorted({part for _, score in scored for part in score.parts})
    figures = {
        **summary("reward", [score.value for _, score in scored]),
        **{f"reward.{part}": _mean([s.parts[part] for _, s in scored if part in s.parts]) for part in parts},
        **summary("len.sampled", [float(t.sampled_tokens) for t in valid]),
        "turns": _mean([float(len(t.turns)) for t in valid]),
        "tool_use": _mean([float(any(turn.message.tool_calls for turn in t.turns)) for t in valid]),
        "tool_calls": _mean([float(sum(len(turn.message.tool_calls) for turn in t.turns)) for t in valid]),
        "parse_error": _mean([float(any(turn.parse_error for turn in t.turns)) for t in valid]),
        "truncated": _mean([float(t.status is Status.TRUNCATED) for t in valid]),
        "n": float(len(trajectories)),
        "n_valid": float(len(scored)),
        "missing": _mean([float(isinstance(t.score, Missing)) for t in trajectories]),
    }
    stops = {str(t.stop) for t in valid}
    return {
        **{name: value for name, value in figures.items() if value == value},
        **{f"stop.{stop}": _mean([float(t.stop == stop) for t in valid]) for stop in sorted(stops)},
    }


def _group_figures(groups: Sequence[Group]) -> dict[str, float]:
    valid = [values for group in groups if (values := outcomes(group))]
    figures = {
        "group.all_good": [float(min(values) > 0) for values in valid],
        "group.all_bad": [float(max(values) <= 0) for values in valid],
        "group.mixed": [float(min(values) <= 0 < max(values)) for values in valid],
        "dup_in_group": [_duplicates(group) for group in groups],
    }
    return {name: _mean(values) for name, values in figures.items() if values}


def _duplicates(group: Group) -> float:
    sampled = [tuple(turn.completion_ids for turn in t.turns) for t in group.trajectories]
    return 1 - len(set(sampled)) / len(sampled) if sampled else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _prefixed(prefix: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in figures.items()}
