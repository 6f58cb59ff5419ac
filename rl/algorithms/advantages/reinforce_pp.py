"""REINFORCE++: one baseline and one scale over the whole batch, weighted by tokens.

With the reward at the end of the trajectory and no discount the return of each of its tokens is the reward,
so that whitening over tokens is whitening over trajectories weighted by their lengths.
"""

from __future__ import annotations

import numpy as np

from rl.algorithms.advantages.registry import ADVANTAGES, standalone

_EPSILON = 1e-8


def whiten(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(var + 1e-8) over tokens; `weights` [n]: tokens of each value; var with n - 1."""
    count = weights.sum()
    if count <= 1:
        return np.zeros_like(values)
    centred = values - weights @ values / count
    return centred / np.sqrt(weights @ centred**2 / (count - 1) + _EPSILON)


@ADVANTAGES.register("reinforce_pp")
@standalone
def reinforce_pp(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns whitened over the tokens of the batch (REINFORCE++); the groups play no part."""
    del groups
    return whiten(rewards, lengths)


@ADVANTAGES.register("reinforce_pp_baseline")
def reinforce_pp_baseline(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The group's mean is subtracted first, then whitened over the batch (REINFORCE++-baseline)."""
    centred = rewards.copy()
    for group in np.unique(groups):
        centred[groups == group] -= rewards[groups == group].mean()
    return whiten(centred, lengths)
