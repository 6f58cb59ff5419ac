"""Generalised advantage estimation over tokens, where tool tokens do not count as steps.

Both forms take [n, T] rows: the serial one is the definition, the chunked one solves the same recurrence a
block of steps at a time with a matrix product, which is what long trajectories need.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rl.algorithms.advantages.registry import ADVANTAGES, standalone, with_critic


@ADVANTAGES.register("gae")
@standalone
@with_critic
def terminal(
    rewards: np.ndarray, *, gae_gamma: float = 1.0, gae_lambda: float = 1.0, gae_whiten: bool = True
) -> np.ndarray:
    """The rewards as they are: with a critic's values, `gae` makes advantages of each token of them.

    Args:
        rewards: float64 [k].
        gae_gamma: discount.
        gae_lambda: GAE's lambda.
        gae_whiten: whether the advantages of a batch are brought to mean 0 and variance 1.
    """
    del gae_gamma, gae_lambda, gae_whiten  # of the second half, `rl.trainers.critic.estimate`
    return rewards


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1} (Schulman et al. 2016).

    t + 1 is the next *masked* token: tool tokens and padding are skipped for V and A; theirs is 0.

    Args:
        rewards: [n, T], read at masked tokens only.
        values: [n, T], V before the token is emitted.
        mask: bool [n, T], True at the policy's own tokens.
        gamma: discount.
        lam: GAE's lambda.
        chunk: steps solved at once; 0 goes token by token.

    Returns:
        Advantages and returns (advantages + values, before any whitening), [n, T], 0 outside the mask.
    """
    steps, position, inside = _compact(mask)
    deltas = _deltas(_take(rewards, steps, inside), _take(values, steps, inside), gamma)
    packed = _reverse_scan(deltas, gamma * lam, chunk)
    advantages = torch.where(mask, packed.gather(1, position), torch.zeros_like(values))
    return advantages, torch.where(mask, advantages + values, torch.zeros_like(values))


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, chunk: int = 0) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the masked tokens, [n, T]; 0 outside the mask."""
    steps, position, inside = _compact(mask)
    packed = _reverse_scan(_take(rewards, steps, inside), gamma, chunk)
    return torch.where(mask, packed.gather(1, position), torch.zeros_like(rewards))


def _compact(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moves masked tokens to the front: indices [n, T], each token's place there, what is filled."""
    steps = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    inside = torch.arange(mask.shape[1], device=mask.device) < mask.sum(1, keepdim=True)
    return steps, position, inside


def _take(values: Tensor, steps: Tensor, inside: Tensor) -> Tensor:
    return torch.where(inside, values.gather(1, steps), torch.zeros_like(values))


def _deltas(rewards: Tensor, values: Tensor, gamma: float) -> Tensor:
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    return rewards + gamma * following - values


def _reverse_scan(x: Tensor, decay: float, chunk: int) -> Tensor:
    """y_t = x_t + decay * y_{t+1}, [n, T]."""
    out, carry = torch.empty_like(x), x.new_zeros(x.shape[0])
    if chunk <= 1:
        for t in range(x.shape[1] - 1, -1, -1):
            carry = out[:, t] = x[:, t] + decay * carry
        return out
    for start in range((x.shape[1] - 1) // chunk * chunk, -1, -chunk):
        block = x[:, start : start + chunk]
        powers = _powers(block.shape[1], decay, x)
        out[:, start : start + chunk] = block @ powers[1].T + carry[:, None] * powers[0]
        carry = out[:, start]
    return out


def _powers(size: int, decay: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """decay^(size - t) for the carry, [size], and the upper triangle decay^(s - t), [size, size]."""
    index = torch.arange(size, device=like.device)
    base = torch.tensor(decay, dtype=torch.float64, device=like.device)
    triangle = torch.triu(base ** (index[None, :] - index[:, None]).clamp(min=0))
    return (base ** (size - index)).to(like.dtype), triangle.to(like.dtype)
