"""Exact top-k with a total order, so that the choice never depends on the batch or the width of the row.

Index scores tie for real (a ReLU makes many of them exactly zero), and `torch.topk` breaks ties differently
for different widths: two passes over the same tokens would then attend to different entries.
"""

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.topk import reference

__all__ = ["FEW", "topk"]

FEW = 256
"""For more rows than these there is a variant of the kernels."""


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
    """Columns of the k largest scores of each row, ascending; equal scores go to the lowest column.

    Columns outside begins[r] .. ends[r] - 1, -inf and NaN are never chosen.

    Args:
        scores: [R, S] fp32.
        k: how many.
        begins: [R] int32, first visible column (0 when None).
        ends: [R] int32, one past the last visible column (S when None).
        blocks: [R, C] int32 ascending numbers of `block_size` neighbouring columns, -1 for none: no others
            are chosen.
        block_size: columns of a block.
        packed: `scores` are [R, C * block_size], those of the blocks' columns alone, block after block;
            there are no `begins` and `ends` then.

    Returns:
        [R, k] int32, padded with -1 at the end of rows that have fewer choices.
    """
    if scores.dtype != torch.float32 or scores.dim() != 2 or k < 1:
        raise ValueError(
            f"topk takes fp32 scores [R, S] and k >= 1, got {scores.dtype} {tuple(scores.shape)}, k={k}"
        )
    options = {"begins": begins, "ends": ends, "blocks": blocks, "block_size": block_size, "packed": packed}
    if use_kernel("topk", scores):
        from model.ops.topk import triton

        return triton.topk(scores, k, **options)
    return reference.topk(scores, k, **options)
