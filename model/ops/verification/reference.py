"""Definition of rejection sampling over integer weights."""

import torch
from torch import Tensor

from model.ops.sampling.reference import pick, weights

REST_BITS = 52
"""What is left of p is weighed in units of 2^-52."""


def verification(
    target: Tensor,
    proposed: Tensor,
    index: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    draws: Tensor,
    rest_draws: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `model.ops.verification.verification`."""
    width = drafts.shape[1]
    p = _probabilities(target)
    rows = torch.arange(len(drafts), device=target.device)
    accepted = torch.zeros_like(lengths)
    if width:
        q = _probabilities(proposed[:width]).transpose(0, 1)
        chance = q.gather(2, drafts.unsqueeze(2)).squeeze(2)
        passed = draws * chance < p[index[:, :-1], drafts]
        checked = torch.arange(width, device=target.device) < lengths[:, None]
        accepted = (passed & checked).long().cumprod(1).sum(1)
    last = p[index[rows, accepted]]
    mass = _units(last)
    if width:
        rest = _units((last - q[rows, accepted.clamp_max(width - 1)]).clamp_min_(0.0))
        # Where rounding alone refused, nothing is left: p equals q, and p is drawn from.
        short = (accepted < lengths) & (rest.sum(1) > 0)
        mass = torch.where(short[:, None], rest, mass)
    return accepted, pick(mass, rest_draws)


def _probabilities(logits: Tensor) -> Tensor:
    mass = weights(logits)
    return mass.double() / mass.sum(-1, keepdim=True).double()


def _units(p: Tensor) -> Tensor:
    return p.mul(2.0**REST_BITS).add_(0.5).nan_to_num_(0.0).long()
