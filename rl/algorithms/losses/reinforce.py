"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from rl.algorithms.losses.registry import LOSSES
from rl.algorithms.records import LossInputs, LossOutputs


@LOSSES.register("reinforce")
def reinforce(inputs: LossInputs) -> LossOutputs:
    """-A log pi (Williams 1992). It takes samples for on-policy; add a correction when they are not."""
    return LossOutputs(-inputs.masked(inputs.advantages) * inputs.masked(inputs.logprobs))
