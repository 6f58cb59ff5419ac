"""Definition of the index scores and of the choice made from them."""

import torch
from torch import Tensor

from model.ops.topk.reference import topk

_CHUNK = 256


def index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores [T, S] fp32 of queries [T, H, D] against keys [S, D]."""
    dots = torch.einsum("thd,sd->ths", query.float(), keys.float())
    return torch.einsum("ths,th->ts", torch.relu(dots), weights.float())


def index_topk(
    query: Tensor, keys: Tensor, weights: Tensor, k: int, *, begins: Tensor, ends: Tensor
) -> Tensor:
    """See `model.ops.indexer.index_topk`."""
    parts = [
        topk(index_scores(q, keys, w), k, begins=b, ends=e)
        for q, w, b, e in zip(*(x.split(_CHUNK) for x in (query, weights, begins, ends)), strict=True)
    ]
    return torch.cat(parts)
