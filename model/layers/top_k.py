"""Selection of the largest scores with one fixed rule for ties, whatever the width or batch."""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN_FREE = 0x7FFFFFFF


def top_k_lowest_index(scores: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the `k` largest of `scores` [..., n], in no order; ties go to the lower index.

    Exact ties are real: an index score is exactly 0 whenever no head responds. Each score is turned into an
    integer of the same order, with the reversed index in the low bits, so that no two are equal.
    """
    bits = (scores.float() + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _SIGN_FREE, bits).long()
    width = scores.shape[-1]
    reversed_index = torch.arange(width - 1, -1, -1, device=scores.device)
    return ordered.bitwise_left_shift_(32).bitwise_or_(reversed_index).topk(k, dim=-1, sorted=False).indices
