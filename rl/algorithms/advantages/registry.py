"""The registry of advantage estimators.

An estimator is `(rewards, [lengths], *, settings) -> advantages` over the valid members of one group, all
float64 [k]. One that has a parameter `groups` is given the whole batch at once. `needs_group` on it says that
it compares with others of the group, so that a group of one teaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rl.algorithms.registry import Registry

Estimator = Callable[..., np.ndarray]

ADVANTAGES: Registry[Estimator] = Registry("advantage", "rewards", ("lengths", "groups"))


def standalone(estimator: Estimator) -> Estimator:
    """Marks an estimator that needs no other member of the group."""
    estimator.needs_group = False  # type: ignore[attr-defined]
    return estimator


def with_critic(estimator: Estimator) -> Estimator:
    """Marks an estimator whose rewards become advantages of tokens through a critic's values."""
    estimator.needs_critic = True  # type: ignore[attr-defined]
    return estimator


def needs_critic(estimator: Estimator) -> bool:
    """Whether values of a critic are needed."""
    return getattr(estimator, "needs_critic", False)


def needs_group(estimator: Estimator) -> bool:
    """Whether an estimator compares a sample with others of its group (a user's own: yes, unless marked)."""
    return getattr(estimator, "needs_group", True)
