"""The length penalty that ties how much a policy writes to the effort it was asked for.

    r_len(b, l) = -min(C_max, k(b) l / L_norm),    k(b) = k0 exp(-(b - b_min) / tau),
    tau = tau_scale x mean gap of the training efforts

after the DeepSeek-V4.1 report, 5.1.4. `l` counts the sampled tokens of all turns and branches. Because C_max
is smaller than the distance between a right and a wrong answer, no wrong answer ever beats a right one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from envs.types import Missing, Score

Gate = Literal["any_correct", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPenaltyConfig:
    """The penalty's constants, checked so that the outcome always counts for more than the length.

    `efforts` are the levels trained at: the least is b_min, and their mean gap times `tau_scale` is tau. The
    gate says whether groups without a right answer pay too. k0 rises linearly over `warmup_steps` steps.

    Raises:
        ValueError: A constant out of range; the message names it.
    """

    k0: float
    max_penalty: float
    length_scale: float
    efforts: tuple[int, ...]
    tau_scale: float = 1.0
    gate: Gate = "any_correct"
    warmup_steps: int = 0
    reward_correct: float = 1.0
    reward_wrong: float = 0.0

    def __post_init__(self) -> None:
        problems = [message for bad, message in self._checks() if bad]
        if problems:
            raise ValueError("length penalty: " + "; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        distance = self.reward_correct - self.reward_wrong
        numbers = (self.k0, self.max_penalty, self.length_scale, self.tau_scale, distance)
        efforts = list(self.efforts)
        return [
            (not all(map(math.isfinite, numbers)), f"constants must be finite, not {numbers}"),
            (self.k0 < 0, f"k0 must be 0 or more, not {self.k0}"),
            (self.length_scale <= 0, f"length_scale must be above 0, not {self.length_scale}"),
            (self.tau_scale <= 0, f"tau_scale must be above 0, not {self.tau_scale}"),
            (self.warmup_steps < 0, f"warmup_steps must be 0 or more, not {self.warmup_steps}"),
            (self.gate not in ("any_correct", "always"), f"gate is any_correct or always, not {self.gate!r}"),
            (
                len(efforts) < 2
                or efforts != sorted(set(efforts))
                or not 1 <= efforts[0] <= efforts[-1] <= 100,
                f"efforts must be two or more ascending levels in 1..100, not {self.efforts}",
            ),
            (
                not 0 <= self.max_penalty < distance,
                f"max_penalty must be at least 0 and below reward_correct - reward_wrong = {distance:g}, "
                f"not {self.max_penalty}, or a short wrong answer could beat a long right one",
            ),
        ]

    @property
    def tau(self) -> float:
        """The effort difference over which the price of a token falls by the factor e."""
        return self.tau_scale * (self.efforts[-1] - self.efforts[0]) / (len(self.efforts) - 1)

    def price(self, effort: int, step: int | None = None) -> float:
        """Returns k(b) at a training step; without a step, the price after the warm-up."""
        warm = 1.0 if step is None or not self.warmup_steps else min(1.0, step / self.warmup_steps)
        return warm * self.k0 * math.exp(-(effort - self.efforts[0]) / self.tau)

    def penalty(self, effort: int, tokens: int, step: int | None = None) -> float:
        """Returns r_len(b, l), which lies in [-max_penalty, 0]."""
        return -min(self.max_penalty, self.price(effort, step) * tokens / self.length_scale)


def apply(
    config: LengthPenaltyConfig,
    scores: Sequence[Score | Missing],
    *,
    effort: int,
    tokens: Sequence[int],
    truncated: Sequence[bool],
    step: int | None = None,
) -> list[Score | Missing]:
    """Adds the penalty to the scores of one group, which share a task and an effort.

    A truncated sample pays max_penalty wherever tokens have a price. With the gate `any_correct` a group in
    which no sample is right is left as it is. Parts `outcome` and `length` are added to every
    score; a missing score stays missing.
    """
    outcomes = [score.value for score in scores if isinstance(score, Score)]
    middle = (config.reward_correct + config.reward_wrong) / 2
    pays = config.gate == "always" or any(value > middle for value in outcomes)
    cap = config.max_penalty if config.price(effort, step) > 0 else 0.0
    result: list[Score | Missing] = []
    for score, length, cut in zip(scores, tokens, truncated, strict=True):
        if isinstance(score, Missing):
            result.append(score)
            continue
        penalty = 0.0 if not pays else -cap if cut else config.penalty(effort, length, step)
        parts = {**score.parts, "outcome": score.value, "length": penalty}
        result.append(Score(score.value + penalty, parts))
    return result
