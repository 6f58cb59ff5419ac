"""CISPO: the importance weight is clipped, never the gradient."""

from __future__ import annotations

from rl.algorithms.losses.registry import LOSSES
from rl.algorithms.records import LossInputs, LossOutputs


@LOSSES.register("cispo")
def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossOutputs:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi (MiniMax-M1 2025; the default range [0, 5] is ScaleRL's)."""
    ratio = inputs.log_ratio().exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * inputs.masked(inputs.advantages) * inputs.masked(inputs.logprobs)
    metrics = {"clip.low": (ratio < 1 - clip_low).float(), "clip.high": (ratio > 1 + clip_high).float()}
    return LossOutputs(loss, metrics)
