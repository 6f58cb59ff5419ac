"""A weight of the entropy bonus that answers to the entropy: it rises below a target and falls above it.

With a constant weight the entropy either collapses all the same, or grows without end: what a weight does
depends on how much one choice is worth over another, which changes while the policy learns.
"""

from __future__ import annotations


def target_at(target: float, step: int, steps: int, decay_from: float) -> float:
    """The target in force at `step` (from 0) of `steps`, in nats a token.

    It stays until the share `decay_from` of the steps and falls linearly from there to 0 at their end, so
    that the policy explores while it can still change and decides before it is done.
    """
    left = 1 - step / max(steps, 1)
    return target * min(1.0, max(0.0, left) / (1 - decay_from))


def next_coefficient(
    coefficient: float, entropy: float, target: float, *, rate: float, limit: float
) -> float:
    """The bonus's weight for the next step, from 0 to `limit`.

    The weight moves by `rate` times how far the entropy is below the target, as a share of the target; the
    share counts as 1 at most either way, so that no batch moves it far. The idea of steering by a target is
    that of Skywork-OR1 (He et al. 2025), whose weight moves by a constant.

    Args:
        coefficient: weight of the last step.
        entropy: mean entropy of the tokens trained in it, in nats.
        target: what it should be, in nats; at 0 the weight falls.
        rate: greatest change.
        limit: greatest weight.
    """
    missing = (target - entropy) / target if target > 0 else -1.0
    return min(limit, max(0.0, coefficient + rate * min(1.0, max(-1.0, missing))))
