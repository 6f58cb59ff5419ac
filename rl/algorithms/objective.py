"""The whole objective over one micro-batch: policy loss, corrections, KL and entropy, in one weighted sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl.algorithms import kl
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.corrections import CORRECTIONS
from rl.algorithms.losses import LOSSES
from rl.algorithms.records import LossInputs


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss to differentiate (part of the batch's; nobody divides again), and metric sums over tokens."""

    loss: Tensor
    sums: dict[str, Tensor]


def objective(config: AlgorithmConfig, inputs: LossInputs, weights: Tensor) -> Objective:
    """Sums the token losses of a micro-batch, each times the batch-wide weight of its sequence.

    Args:
        config: which loss, corrections and regularisers.
        inputs: the micro-batch.
        weights: [segments], from `aggregation.sequence_weights` over the whole batch.
    """
    sums: dict[str, Tensor] = {}
    divergence = _divergence(config, inputs)
    if divergence is not None:
        sums["kl.ref"] = divergence.detach().sum()
        if config.kl_in == "reward":
            penalty = config.kl_coef * divergence.detach()
            inputs = replace(inputs, advantages=inputs.masked(inputs.advantages) - penalty)
    loss = LOSSES.load(config.loss)
    policy = loss(inputs, **config.settings_for(loss))
    correction = _correction(config, inputs)
    per_token = policy.loss * correction
    if divergence is not None and config.kl_in == "loss":
        per_token = per_token + config.kl_coef * divergence
    if config.entropy_coef:
        assert inputs.entropy is not None
        per_token = per_token - config.entropy_coef * inputs.masked(inputs.entropy)
    sums |= {name: inputs.masked(values.detach().float()).sum() for name, values in policy.metrics.items()}
    sums["mask.off_policy"] = inputs.masked((correction == 0).float()).sum()
    return Objective((inputs.masked(per_token) * inputs.spread(weights)).sum(), sums)


def _correction(config: AlgorithmConfig, inputs: LossInputs) -> Tensor:
    weights = torch.ones_like(inputs.logprobs.detach())
    for name in config.corrections:
        correction = CORRECTIONS.load(name)
        weights = weights * correction(inputs, **config.settings_for(correction))
    return weights


def _divergence(config: AlgorithmConfig, inputs: LossInputs) -> Tensor | None:
    if not config.needs_reference:
        return None
    assert inputs.reference_logprobs is not None
    logprobs, old = inputs.masked(inputs.logprobs), inputs.masked(inputs.old_logprobs)
    return kl.estimate(config.kl, logprobs, inputs.masked(inputs.reference_logprobs), old)
