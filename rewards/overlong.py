"""The penalty of DAPO for answers that come near the greatest length, so that being cut is no surprise.

    r(l) = 0                                  for l <= max_length - buffer
           -(l - (max_length - buffer)) / buffer * penalty   beyond

after Yu et al. 2025, eq. 13, where it is used with penalty 1. Trainers let it go on rising beyond the
greatest length; in the paper it stays at -penalty there, which `floor` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongConfig:
    """The penalty's constants, in sampled tokens of all turns and branches.

    Attributes:
        max_length: where the penalty reaches `penalty`.
        buffer: over how many tokens before that it rises.
        penalty: its size there.
        floor: whether it rises no further, as in the paper.

    Raises:
        ValueError: A constant out of range; the message names it.
    """

    max_length: int
    buffer: int
    penalty: float = 1.0
    floor: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.buffer <= self.max_length:
            raise ValueError(
                f"overlong: buffer={self.buffer} tokens lie before max_length={self.max_length}; it is "
                "from 1 to max_length"
            )
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"overlong: penalty={self.penalty}; it is 0 or more")

    def value(self, tokens: int) -> float:
        """The penalty of a sample of so many tokens: 0 or below."""
        over = (tokens - (self.max_length - self.buffer)) / self.buffer
        return -self.penalty * max(0.0, min(over, 1.0) if self.floor else over)
