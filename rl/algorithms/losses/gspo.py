"""GSPO: the ratio, and so the clip, belongs to the whole sequence."""

from __future__ import annotations

import torch

from rl.algorithms.losses.registry import LOSSES, clip_metrics
from rl.algorithms.records import LossInputs, LossOutputs

_LOG_RATIO_CAP = 10.0


@LOSSES.register("gspo")
def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutputs:
    """Clipped loss with s = exp(mean_t log r) (Zheng et al. 2025), in its token form.

    The value at each token is that of its sequence; the gradient flows through the token's own logprob. With
    `seq_mean_token_mean` it is exactly the sequence-level loss.
    """
    mean = inputs.spread(inputs.segment_mean(inputs.log_ratio())).detach()
    logprobs, advantages = inputs.masked(inputs.logprobs), inputs.masked(inputs.advantages)
    ratio = (logprobs - logprobs.detach() + mean).clamp(max=_LOG_RATIO_CAP).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return LossOutputs(loss, clip_metrics(inputs, ratio, clip_low, clip_high))
