"""Policy losses, one file each: `(LossInputs, *, settings) -> LossOutputs`, registered by name."""

from rl.algorithms.losses.cispo import cispo
from rl.algorithms.losses.dppo import dppo_tv
from rl.algorithms.losses.gmpo import gmpo
from rl.algorithms.losses.gspo import gspo
from rl.algorithms.losses.ppo import dual_clip, ppo_clip
from rl.algorithms.losses.registry import LOSSES
from rl.algorithms.losses.reinforce import reinforce
from rl.algorithms.losses.sapo import sapo

__all__ = ["LOSSES", "cispo", "dppo_tv", "dual_clip", "gmpo", "gspo", "ppo_clip", "reinforce", "sapo"]
