"""Definition of the indexer's loss over a selection, in fp32 and differentiable."""

import torch
from torch import Tensor

_CHUNK = 256
SMALLEST_SUM, SMALLEST_MASS = 1e-20, 1e-10


def index_loss(
    heads: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    query: Tensor,
    entries: Tensor,
    lse: Tensor,
    indices: Tensor,
    *,
    scale: float,
) -> Tensor:
    """See `model.ops.index_loss.index_loss`; fp64 arguments stay fp64."""
    wide = torch.promote_types(heads.dtype, torch.float32)
    parts = []
    rows = (heads, weights, query, lse, indices)
    for a, w, q, denominator, index in zip(*(x.split(_CHUNK) for x in rows), strict=True):
        chosen, at = index >= 0, index.clamp_min(0).long()
        with torch.no_grad():
            scores = torch.einsum("thd,tkd->thk", q.to(wide), entries[at].to(wide)) * scale
            mass = (scores - denominator.to(wide)[:, :, None]).exp().sum(1) * chosen
            mass = mass / mass.sum(-1, keepdim=True).clamp_min(SMALLEST_SUM)
        dots = torch.einsum("tgc,tkc->tgk", a.to(wide), index_keys[at].to(wide)).relu()
        scores = torch.einsum("tg,tgk->tk", w.to(wide), dots).masked_fill(~chosen, -1e30)
        student = scores.log_softmax(-1).masked_fill(~chosen, 0.0)
        divergence = (mass * (mass.clamp_min(SMALLEST_MASS).log() - student)).sum(-1)
        parts.append(torch.where(chosen.any(-1), divergence, 0.0))
    return torch.cat(parts) if parts else heads.new_zeros(0, dtype=wide)
