"""Definition of the fused reverse KL, in fp32 and differentiable."""

import torch
from torch import Tensor

_CHUNK = 1024


def linear_reverse_kl(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *, temperature: float
) -> Tensor:
    """See `model.ops.linear_reverse_kl.linear_reverse_kl`; fp64 arguments stay fp64."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    own, other = weight.to(wide), teacher_weight.to(wide)
    parts = []
    for x, y in zip(hidden.split(_CHUNK), teacher_hidden.split(_CHUNK), strict=True):
        log_p = torch.log_softmax(x.to(wide) @ own.T / temperature, -1)
        log_q = torch.log_softmax(y.to(wide) @ other.T / temperature, -1)
        parts.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(parts)
