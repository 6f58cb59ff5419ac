"""Candidate blocks: what one index layer keeps of all keys, and the choice of later layers among it.

The source of candidates keeps for each query the blocks of neighbouring keys with the largest scores. A later
layer needs scores of their keys only, which for long contexts are a small part of all.
"""

from torch import Tensor

from model.ops.candidates import reference
from model.ops.dispatch import use_kernel
from model.ops.topk import topk

__all__ = ["best_blocks", "topk_in_blocks"]


def best_blocks(scores: Tensor, visible: Tensor, count: int, size: int) -> Tensor:
    """Blocks of `size` neighbouring keys with the largest scores; that of the newest key is always kept.

    Args:
        scores: [T, S] fp32; those of keys that a query does not see are not read.
        visible: [T] int32 keys that each query sees.
        count: how many blocks.
        size: keys of a block.

    Returns:
        [T, count] int32 ascending block numbers (ties by lowest number), padded with -1.
    """
    if use_kernel("best_blocks", scores):
        from model.ops.candidates import triton

        return topk(triton.block_maxima(scores, visible, size), count)
    return topk(reference.block_maxima(scores, visible, size), count)


def topk_in_blocks(
    query: Tensor, keys: Tensor, weights: Tensor, k: int, *, visible: Tensor, blocks: Tensor, size: int
) -> Tensor:
    """Rows of the k best visible keys of each query among those of its blocks, ascending.

    Args:
        query: [T, H, D] bf16, scored as by `model.ops.indexer.index_topk`.
        keys: [S, D] bf16, at least as many as any query sees.
        weights: [T, H] fp32.
        k: how many.
        visible: [T] int32 keys that each query sees.
        blocks: [T, C] int32 ascending block numbers, -1 for none; where a query sees at most C blocks, all
            of them.
        size: keys of a block.

    Returns:
        [T, k] int32 rows of `keys` (ties by lowest row), padded with -1.
    """
    given = {"visible": visible, "blocks": blocks, "size": size}
    if use_kernel("topk_in_blocks", query):
        from model.ops.candidates import triton

        return triton.topk_in_blocks(query, keys, weights, k, **given)
    return reference.topk_in_blocks(query, keys, weights, k, **given)
