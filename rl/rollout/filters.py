"""Which complete groups are worth training on, by their outcomes (dynamic sampling): pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from rl.rollout.config import FilterConfig


def why_filtered(config: FilterConfig, outcomes: Sequence[float]) -> str:
    """Returns why a group with these outcomes (of its scored members) is dropped; empty: it is kept.

    A group of a single scored member has no variance to speak of and is judged by its mean alone.
    """
    if config.zero_variance and len(outcomes) > 1 and min(outcomes) == max(outcomes):
        return "zero_variance"
    mean = sum(outcomes) / len(outcomes)
    if config.min_outcome is not None and mean < config.min_outcome:
        return "outcome_low"
    if config.max_outcome is not None and mean > config.max_outcome:
        return "outcome_high"
    return ""
