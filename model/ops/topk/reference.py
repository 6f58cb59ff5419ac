"""Definition of the exact top-k: one 64-bit key a column, value first, lowest column second."""

import torch
from torch import Tensor


def order_bits(scores: Tensor) -> Tensor:
    """fp32 -> int64 in the same order; -0 equals +0; -inf and NaN are below everything."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(scores > float("-inf"), ordered, -(2**31))


def columns_of(blocks: Tensor, size: int) -> Tensor:
    """Columns [R, C * size] of blocks [R, C], negative for those of no block."""
    columns = blocks.long()[:, :, None] * size + torch.arange(size, device=blocks.device)
    return torch.where(blocks[:, :, None] >= 0, columns, -1).flatten(1)


def topk(
    scores: Tensor,
    k: int,
    *,
    begins: Tensor | None = None,
    ends: Tensor | None = None,
    blocks: Tensor | None = None,
    block_size: int = 8,
    packed: bool = False,
) -> Tensor:
    """See `model.ops.topk.topk`."""
    width = scores.shape[1]
    column = torch.arange(width, device=scores.device)
    if begins is not None:
        scores = torch.where(column >= begins[:, None], scores, float("-inf"))
    if ends is not None:
        scores = torch.where(column < ends[:, None], scores, float("-inf"))
    columns = None if blocks is None else columns_of(blocks, block_size)
    if columns is not None and packed:
        scores = torch.where(columns >= 0, scores, float("-inf"))
    elif columns is not None:
        held = torch.zeros(len(scores), width + 1, dtype=torch.bool, device=scores.device)
        held.scatter_(1, torch.where((columns >= 0) & (columns < width), columns, width), True)
        scores = torch.where(held[:, :width], scores, float("-inf"))
    key = order_bits(scores)
    best = ((key << 31) - column).topk(min(k, width), 1).indices
    valid = key.gather(1, best) > -(2**31)
    chosen = torch.where(valid, best, width).sort(1).values
    if columns is not None and packed:
        chosen = torch.where(chosen < width, columns.gather(1, chosen.clamp_max(width - 1)), -1)
    else:
        chosen = torch.where(chosen < width, chosen, -1)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1).int()
