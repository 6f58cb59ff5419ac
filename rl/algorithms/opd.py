"""On-policy distillation: the student's own samples, judged by a teacher at every token.

The exact form is the reverse KL over the whole vocabulary. The sampled form sees only the token that was
drawn: it is an unbiased estimate of high variance, kept for comparison and for teachers that report
log-probabilities only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_kl(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(pi_student || pi_teacher) = sum_v p (log p - log q), [..., V] -> [...]. The plain definition.

    `rl.algorithms.linear.linear_reverse_kl` computes the same from hidden states without keeping the logits.
    """
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(teacher_logits, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def sampled_advantages(
    teacher_logprobs: Tensor, logprobs: Tensor, mask: Tensor, *, coefficient: float = 1.0
) -> Tensor:
    """`coefficient` (log pi_teacher - log pi_student) of the sampled token; no gradient, 0 off the mask."""
    gap = coefficient * (teacher_logprobs - logprobs).detach()
    return torch.where(mask, gap, torch.zeros_like(gap))
