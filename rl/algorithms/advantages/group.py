"""Group-relative estimators: a sample is judged by the other samples of the same draw of a task.

All take the rewards of one group's valid members, float64 [k] with k >= 2, and return [k].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.algorithms.advantages.registry import ADVANTAGES

_EPSILON = 1e-6


@ADVANTAGES.register("mean_centered")
def mean_centered(rewards: np.ndarray) -> np.ndarray:
    """R - mean (Dr. GRPO, DeepSeek-V3.2)."""
    return rewards - rewards.mean()


@ADVANTAGES.register("grpo")
def grpo(rewards: np.ndarray) -> np.ndarray:
    """(R - mean) / (std + 1e-6), std with n - 1 (GRPO)."""
    return mean_centered(rewards) / (rewards.std(ddof=1) + _EPSILON)


@ADVANTAGES.register("rloo")
def rloo(rewards: np.ndarray) -> np.ndarray:
    """R - mean of the others (leave one out), which is n / (n - 1) (R - mean)."""
    return mean_centered(rewards) * len(rewards) / (len(rewards) - 1)


@ADVANTAGES.register("maxrl")
def maxrl(rewards: np.ndarray) -> np.ndarray:
    """(R - mean) / mean; 0 where the mean is 0 or below (MaxRL is defined for rewards >= 0)."""
    mean = rewards.mean()
    return mean_centered(rewards) / mean if mean > 0 else np.zeros_like(rewards)


@ADVANTAGES.register("opo")
def opo(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """R - sum(length R) / sum(length): the baseline of least variance (OPO)."""
    total = lengths.sum()
    return rewards - (lengths @ rewards / total if total > 0 else rewards.mean())


@ADVANTAGES.register("pass_at_k")
def pass_at_k(rewards: np.ndarray, *, passk_std: bool = False) -> np.ndarray:
    """Only the best member counts: it gets R_max - R_second, all others 0; divided by the std on demand.

    Of several equally good ones none is needed: all get 0.
    """
    order = np.argsort(rewards, kind="stable")
    advantages = np.zeros_like(rewards)
    gap = rewards[order[-1]] - rewards[order[-2]]
    advantages[order[-1]] = gap / (rewards.std(ddof=1) + _EPSILON) if passk_std else gap
    return advantages


def hierarchical(rewards: Sequence[float], parents: Sequence[int]) -> np.ndarray:
    """Mean-centred among siblings: solvers of one proposal among themselves, and proposals likewise.

    Args:
        rewards: one a node of the tree, [n].
        parents: index of the node's parent, or -1 for a root, [n]. An only child gets 0.
    """
    values, owner = np.asarray(rewards, dtype=np.float64), np.asarray(parents, dtype=np.int64)
    if values.shape != owner.shape:
        raise ValueError(f"{len(values)} rewards for {len(owner)} parents; there must be one each")
    out = np.zeros_like(values)
    for parent in np.unique(owner):
        out[owner == parent] = mean_centered(values[owner == parent])
    return out
