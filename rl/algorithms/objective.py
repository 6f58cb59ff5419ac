"""The whole objective over one micro-batch: policy loss, corrections, KL and entropy, in one weighted sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl.algorithms import kl
from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.corrections import CORRECTIONS
from rl.algorithms.losses import LOSSES
from rl.algorithms.records import LossInputs, LossOutputs
from rl.algorithms.registry import AlgorithmError


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss to differentiate (part of the batch's; nobody divides again), and metric sums over tokens."""

    loss: Tensor
    sums: dict[str, Tensor]


def objective(
    config: AlgorithmConfig, inputs: LossInputs, weights: Tensor, *, entropy_coef: float | None = None
) -> Objective:
    """Sums the token losses of a micro-batch, each times the batch-wide weight of its sequence.

    Args:
        config: which loss, corrections and regularisers.
        inputs: the micro-batch.
        weights: [segments], from `aggregation.sequence_weights` over the whole batch.
        entropy_coef: the entropy bonus's weight in this step, where a target moves it; None: the configured.
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
    _check_outputs(config.loss, policy, inputs)
    correction = _correction(config, inputs)
    per_token = policy.loss * correction
    if divergence is not None and config.kl_in == "loss":
        per_token = per_token + config.kl_coef * divergence
    bonus = config.entropy_coef if entropy_coef is None else entropy_coef
    if bonus:
        assert inputs.entropy is not None
        per_token = per_token - bonus * inputs.masked(inputs.entropy)
    sums |= {name: inputs.masked(values.detach().float()).sum() for name, values in policy.metrics.items()}
    sums["mask.off_policy"] = inputs.masked((correction == 0).float()).sum()
    return Objective((inputs.masked(per_token) * inputs.spread(weights)).sum(), sums)


def _correction(config: AlgorithmConfig, inputs: LossInputs) -> Tensor:
    weights = torch.ones_like(inputs.logprobs.detach())
    for name in config.corrections:
        correction = CORRECTIONS.load(name)
        factor = correction(inputs, **config.settings_for(correction))
        _require_tokens(f"correction {name!r}", factor, inputs)
        weights = weights * factor
    return weights


def _check_outputs(name: str, outputs: object, inputs: LossInputs) -> None:
    """Refuses what a user's own loss may return by mistake, before it is broadcast over the tokens."""
    if not isinstance(outputs, LossOutputs):
        raise AlgorithmError(
            f"loss {name!r} returned a {type(outputs).__name__}; it returns LossOutputs(loss, metrics) with "
            "a value for each token"
        )
    _require_tokens(f"loss {name!r}", outputs.loss, inputs)
    for metric, values in outputs.metrics.items():
        _require_tokens(f"metric {metric!r} of loss {name!r}", values, inputs)


def _require_tokens(what: str, values: object, inputs: LossInputs) -> None:
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != tuple(inputs.logprobs.shape):
        raise AlgorithmError(
            f"{what} returned {shape} for {len(inputs.logprobs)} tokens; it returns a tensor with one value "
            "for each token, [T], and nobody averages before the batch does"
        )


def _divergence(config: AlgorithmConfig, inputs: LossInputs) -> Tensor | None:
    if not config.needs_reference:
        return None
    assert inputs.reference_logprobs is not None
    logprobs, old = inputs.masked(inputs.logprobs), inputs.masked(inputs.old_logprobs)
    return kl.estimate(config.kl, logprobs, inputs.masked(inputs.reference_logprobs), old)
