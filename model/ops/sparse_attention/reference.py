"""Definition of sparse attention with a sink, in plain PyTorch and differentiable."""

import torch
from torch import Tensor

_CHUNK = 256


def attend(query: Tensor, keys: Tensor, visible: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One softmax per query and head over its own keys and a sink that only enters the denominator.

    Args:
        query: [T, H, D].
        keys: [T, N, D], keys and values.
        visible: [T, N] bool.
        sink: [H].
        scale: softmax scale.

    Returns:
        Output [T, H, D] and log of the denominator [T, H] (natural logarithm).
    """
    scores = torch.einsum("thd,tnd->thn", query, keys) * scale
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    scores = torch.cat([scores, sink[None, :, None].expand(len(query), -1, 1)], 2)
    lse = torch.logsumexp(scores, 2)
    weights = torch.exp(scores[..., :-1] - lse[..., None])
    return torch.einsum("thn,tnd->thd", weights, keys), lse


def window_rows(first: Tensor, last: Tensor, size: int) -> Tensor:
    """Window rows of each query, oldest first: [T, size] int32, -1 where the window starts before `first`."""
    rows = last[:, None] - (size - 1) + torch.arange(size, dtype=torch.int32, device=last.device)
    return torch.where(rows >= first[:, None], rows, -1)


def forward(
    query: Tensor,
    entries: Tensor,
    indices: Tensor,
    window: Tensor,
    first: Tensor,
    last: Tensor,
    sink: Tensor,
    *,
    scale: float,
    window_size: int,
) -> tuple[Tensor, Tensor]:
    """See `model.ops.sparse_attention.sparse_attention`. Works in fp32, or in fp64 for fp64 arguments."""
    wide = torch.promote_types(query.dtype, torch.float32)
    table = torch.cat([entries.to(wide), window.to(wide)])
    rows = window_rows(first, last, window_size)
    index = torch.cat([indices, torch.where(rows >= 0, rows + len(entries), -1)], 1)
    parts = [
        attend(q.to(wide), table[i.clamp(min=0).long()], i >= 0, sink.to(wide), scale)
        for q, i in zip(query.split(_CHUNK), index.split(_CHUNK), strict=True)
    ]
    return torch.cat([out for out, _ in parts]).to(query.dtype), torch.cat([lse for _, lse in parts])
