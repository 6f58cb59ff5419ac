"""Definition of the fused log-probability and entropy, in fp32 and differentiable."""

import torch
from torch import Tensor

_CHUNK = 1024


def linear_logprob(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `model.ops.linear_logprob.linear_logprob`; fp64 arguments stay fp64."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    head = weight.to(wide)
    logprobs, entropies, correct = [], [], []
    for x, label in zip(hidden.split(_CHUNK), labels.split(_CHUNK), strict=True):
        logp = torch.log_softmax(x.to(wide) @ head.T / temperature, -1)
        logprobs.append(logp.gather(1, label[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
        correct.append(logp.detach().argmax(1) == label)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(correct)
