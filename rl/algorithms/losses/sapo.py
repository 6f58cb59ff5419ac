"""SAPO: a sigmoid gate around ratio 1 in place of a hard clip."""

from __future__ import annotations

import torch

from rl.algorithms.losses.registry import LOSSES
from rl.algorithms.records import LossInputs, LossOutputs


@LOSSES.register("sapo")
def sapo(inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> LossOutputs:
    """-(4 / tau) sigmoid(tau (r - 1)) A; tau depends on the sign of A (Gao et al. 2025). Slope 1 at r = 1."""
    ratio, advantages = inputs.log_ratio().exp(), inputs.masked(inputs.advantages)
    positive = torch.full_like(ratio, tau_positive)
    tau = torch.where(advantages > 0, positive, torch.full_like(ratio, tau_negative))
    return LossOutputs(-(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages)
