"""GMPO: the geometric mean of token ratios, each clipped on the side that its advantage makes dangerous."""

from __future__ import annotations

import torch

from rl.algorithms.losses.registry import LOSSES
from rl.algorithms.records import LossInputs, LossOutputs


@LOSSES.register("gmpo")
def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> LossOutputs:
    """-A exp(mean_t log r_t), log r_t at most `clip_high` where A >= 0, at least -`clip_low` where A < 0.

    The range is one of log-ratios, e^-0.4 to e^0.4 in the paper (Zhao et al. 2025).
    """
    log_ratio, advantages = inputs.log_ratio(), inputs.masked(inputs.advantages)
    clipped = torch.where(advantages < 0, log_ratio.clamp(min=-clip_low), log_ratio.clamp(max=clip_high))
    ratio = inputs.spread(inputs.segment_mean(clipped)).exp()
    metrics = {
        "clip.low": ((advantages < 0) & (log_ratio < -clip_low)).float(),
        "clip.high": ((advantages > 0) & (log_ratio > clip_high)).float(),
    }
    return LossOutputs(-advantages * ratio, metrics)
