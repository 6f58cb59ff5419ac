"""Estimators of KL(pi_theta || pi_ref) from the sampled token alone (Schulman 2020), and the unbiased one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl.algorithms.registry import Registry

KL: Registry[Callable[..., Tensor]] = Registry("KL estimator", "difference")

INPUT_CLAMP, OUTPUT_CLAMP = 20.0, 10.0


@KL.register("k1")
def k1(difference: Tensor) -> Tensor:
    """D = log pi_theta - log pi_ref: unbiased, can be negative. Its gradient as a loss is zero on average."""
    return difference


@KL.register("k2")
def k2(difference: Tensor) -> Tensor:
    """d^2 / 2: biased value, the right gradient on-policy."""
    return difference.square() / 2


@KL.register("k3")
def k3(difference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased value, never negative."""
    return torch.expm1(-difference) + difference


def estimate(
    name: str,
    logprobs: Tensor,
    reference: Tensor,
    old: Tensor | None = None,
    *,
    input_clamp: float | None = INPUT_CLAMP,
    output_clamp: float | None = OUTPUT_CLAMP,
) -> Tensor:
    """Estimates the KL per token, in the shape of `logprobs`.

    `unbiased` (DeepSeek-V3.2) is k3 times pi_theta / pi_old, which makes value and gradient unbiased for
    samples of pi_old, and needs `old`. The difference is clamped to +-`input_clamp`, the estimate to
    +-`output_clamp`.
    """
    difference = logprobs - reference
    if input_clamp is not None:
        difference = difference.clamp(-input_clamp, input_clamp)
    values = KL.load("k3" if name == "unbiased" else name)(difference)
    if output_clamp is not None:
        values = values.clamp(-output_clamp, output_clamp)
    if name != "unbiased":
        return values
    if old is None:
        raise ValueError("the unbiased KL needs the log-probabilities that the tokens were sampled with")
    return values * (logprobs - old).clamp(-INPUT_CLAMP, INPUT_CLAMP).exp()


NAMES = (*KL.names(), "unbiased")
