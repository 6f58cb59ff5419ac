"""Advantage estimators, and `compute`, which applies one to a batch of rewards."""

from rl.algorithms.advantages.compute import Advantages, NonFiniteAdvantageError, compute
from rl.algorithms.advantages.gae import discounted_returns, gae
from rl.algorithms.advantages.group import grpo, hierarchical, maxrl, mean_centered, opo, pass_at_k, rloo
from rl.algorithms.advantages.registry import ADVANTAGES, standalone
from rl.algorithms.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline

__all__ = [
    "ADVANTAGES",
    "Advantages",
    "NonFiniteAdvantageError",
    "compute",
    "discounted_returns",
    "gae",
    "grpo",
    "hierarchical",
    "maxrl",
    "mean_centered",
    "opo",
    "pass_at_k",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "standalone",
]
