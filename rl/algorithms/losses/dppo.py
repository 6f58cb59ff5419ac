"""DPPO-TV: tokens are masked by how far their probability moved, not by their ratio."""

from __future__ import annotations

import torch

from rl.algorithms.losses.registry import LOSSES
from rl.algorithms.records import LOG_RATIO_LIMIT, LossInputs, LossOutputs


@LOSSES.register("dppo_tv")
def dppo_tv(
    inputs: LossInputs, *, dppo_low: float = 0.2, dppo_high: float = 0.2, dppo_kl: float = 1e-3
) -> LossOutputs:
    """-keep A exp(l - l_b) + kl (l - l_b)^2, with p = exp(l) against the sampler's q = exp(l_b).

    A token is masked where A > 0 and p - q > high, or A <= 0 and p - q < -low. Both terms are taken against
    the sampler itself, so no further importance correction applies.
    """
    behaviour = inputs.masked(inputs.sampler_logprobs)
    logprobs, advantages = inputs.masked(inputs.logprobs), inputs.masked(inputs.advantages)
    shift = (logprobs.exp() - behaviour.exp()).detach()
    above = (advantages > 0) & (shift > dppo_high)
    below = (advantages <= 0) & (shift < -dppo_low)
    log_ratio = (logprobs - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    surrogate = torch.where(above | below, torch.zeros_like(log_ratio), -advantages * log_ratio.exp())
    loss = surrogate + dppo_kl * log_ratio.square()
    return LossOutputs(loss, {"clip.low": below.float(), "clip.high": above.float()})


dppo_tv.anchored_at_sampler = True  # type: ignore[attr-defined]
