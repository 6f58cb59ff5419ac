"""Off-policy corrections: weights on the policy loss of what the trained policy did not quite sample.

Two causes make a sample off-policy: the engine computes slightly other probabilities than the trainer
(mismatch), and the weights moved since (staleness). Importance corrections weigh by pi_old / pi_sampler, so
they need the ratio taken against the trainer's own log-probabilities (`importance` is set on them); masks
drop tokens or sequences. A dropped token still counts in the loss's denominator.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rl.algorithms.records import LOG_RATIO_LIMIT, LossInputs
from rl.algorithms.registry import Registry

CORRECTIONS: Registry[Callable[..., Tensor]] = Registry("correction", "inputs")


def _importance(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    function.importance = True  # type: ignore[attr-defined]
    return function


def _weights(inputs: LossInputs) -> Tensor:
    return inputs.mismatch().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@CORRECTIONS.register("token_tis")
@_importance
def token_tis(inputs: LossInputs, *, tis_cap: float = 2.0) -> Tensor:
    """Truncated importance sampling by token: min(pi_old / pi_sampler, cap), [T]."""
    return _weights(inputs).clamp(max=tis_cap)


@CORRECTIONS.register("sequence_tis")
@_importance
def sequence_tis(inputs: LossInputs, *, sequence_tis_cap: float = 5.0) -> Tensor:
    """Truncated importance sampling by sequence: min(prod_t pi_old / pi_sampler, cap) on its tokens."""
    total = inputs.segment_sum(inputs.mismatch()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return inputs.spread(total.exp().clamp(max=sequence_tis_cap))


@CORRECTIONS.register("icepop")
@_importance
def icepop(inputs: LossInputs, *, icepop_low: float = 0.5, icepop_high: float = 5.0) -> Tensor:
    """IcePop: w = pi_old / pi_sampler where low <= w <= high, else 0."""
    weights = _weights(inputs)
    return weights * ((weights >= icepop_low) & (weights <= icepop_high))


@CORRECTIONS.register("decoupled_ppo")
@_importance
def decoupled_ppo(inputs: LossInputs, *, behave_cap: float = 5.0) -> Tensor:
    """Decoupled PPO (AReaL): w = pi_prox / pi_sampler, pi_prox = pi_old; w > cap drops the token."""
    weights = _weights(inputs)
    return weights * (weights <= behave_cap)


@CORRECTIONS.register("geometric_mask")
def geometric_mask(
    inputs: LossInputs, *, geometric_low: float = 0.99, geometric_high: float = 1.01
) -> Tensor:
    """Keeps a sequence whose geometric mean of pi_old / pi_sampler lies in [low, high]: 1 or 0, [T]."""
    ratio = inputs.segment_mean(inputs.mismatch()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    keep = (ratio >= geometric_low) & (ratio <= geometric_high)
    return inputs.spread(keep).to(inputs.logprobs.dtype)


geometric_mask.needs_trainer_anchor = True  # type: ignore[attr-defined]


@CORRECTIONS.register("opsm")
def opsm(inputs: LossInputs, *, opsm_delta: float = 0.5) -> Tensor:
    """Off-policy sequence mask (DeepSeek-V3.2): drops A < 0 when mean_t log(pi_sampler / pi_theta) > delta.

    One-sided: what succeeded is never dropped. Equality keeps. The published report names no delta.
    """
    drift = inputs.segment_mean((inputs.sampler_logprobs - inputs.logprobs).detach())
    keep = (inputs.advantages >= 0) | (inputs.spread(drift) <= opsm_delta)
    return keep.to(inputs.logprobs.dtype)


@CORRECTIONS.register("staleness_mask")
def staleness_mask(inputs: LossInputs, *, max_staleness: int) -> Tensor:
    """Drops tokens that were sampled more than `max_staleness` versions ago: 1 or 0, [T]."""
    return (inputs.current_version - inputs.versions <= max_staleness).to(inputs.logprobs.dtype)
