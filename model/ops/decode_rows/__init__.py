"""From keys chosen in a sequence to the rows of their records in the cache."""

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel

__all__ = ["decode_rows"]


def decode_rows(
    chosen: Tensor, table: Tensor, *, page_groups: int, blocks: Tensor | None = None, block_size: int = 8
) -> tuple[Tensor, Tensor]:
    """Rows of the records of chosen keys, and how many there are.

    Args:
        chosen: [B, K] int32 keys of each sequence, -1 at the end; with `blocks` places among the keys of
            those blocks.
        table: [B, P] int64 pages of each sequence.
        page_groups: records on a page.
        blocks: [B, C] int32 blocks of `block_size` keys.
        block_size: keys of a block.

    Returns:
        [B, K] int32, -1 at the end, and [B] int32.
    """
    if use_kernel("decode_rows", chosen):
        from model.ops.decode_rows import triton

        return triton.decode_rows(chosen, table, page_groups, blocks, block_size)
    keys = chosen.long()
    if blocks is not None:
        own = blocks.long().gather(1, torch.div(keys.clamp_min(0), block_size, rounding_mode="floor"))
        keys = torch.where(keys >= 0, own * block_size + keys % block_size, -1)
    safe = keys.clamp_min(0)
    pages = table.gather(1, torch.div(safe, page_groups, rounding_mode="floor"))
    rows = torch.where(keys >= 0, pages * page_groups + safe % page_groups, -1)
    return rows.int(), (keys >= 0).sum(1, dtype=torch.int32)
