"""The registry of policy losses, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rl.algorithms.records import LossInputs, LossOutputs
from rl.algorithms.registry import Registry

LOSSES: Registry[Callable[..., LossOutputs]] = Registry("loss", "inputs")


def clip_metrics(inputs: LossInputs, ratio: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Which tokens the clip silences: below with a negative advantage, above with a positive one."""
    negative, positive = inputs.advantages < 0, inputs.advantages > 0
    return {
        "clip.low": (negative & (ratio < 1 - low)).float(),
        "clip.high": (positive & (ratio > 1 + high)).float(),
    }
