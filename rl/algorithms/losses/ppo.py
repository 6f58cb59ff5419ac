"""PPO's clipped surrogate, with a wider upper range (DAPO), and its dual clip."""

from __future__ import annotations

import torch

from rl.algorithms.losses.registry import LOSSES, clip_metrics
from rl.algorithms.records import LossInputs, LossOutputs


@LOSSES.register("ppo_clip")
def ppo_clip(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutputs:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (Schulman et al. 2017; high > low as in DAPO)."""
    ratio, advantages = inputs.log_ratio().exp(), inputs.masked(inputs.advantages)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return LossOutputs(loss, clip_metrics(inputs, ratio, clip_low, clip_high))


@LOSSES.register("dual_clip")
def dual_clip(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0
) -> LossOutputs:
    """The clipped loss, bounded by -c A where A < 0 (Ye et al. 2020): a huge ratio cannot dominate."""
    outputs = ppo_clip(inputs, clip_low=clip_low, clip_high=clip_high)
    advantages = inputs.masked(inputs.advantages)
    bounded = torch.minimum(outputs.loss, -dual_clip * advantages)
    return LossOutputs(torch.where(advantages < 0, bounded, outputs.loss), outputs.metrics)
