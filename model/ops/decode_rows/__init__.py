"""From keys chosen in a sequence to the rows of their records in the cache."""

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel

__all__ = ["decode_rows"]


def decode_rows(chosen: Tensor, table: Tensor, others: Tensor, *, page_groups: int) -> tuple[Tensor, Tensor]:
    """Rows of the records of chosen keys, and how many there are.

    Args:
        chosen: [B, K] int32 keys of each sequence, -1 at the end.
        table: [B, P] int64 pages of each sequence.
        others: [B] int32, counts of what else is attended to.
        page_groups: records on a page.

    Returns:
        [B, K] int32, -1 at the end, and [B, 2] int32, the counts of these rows and of the others.
    """
    if use_kernel("decode_rows", chosen):
        from model.ops.decode_rows import triton

        return triton.decode_rows(chosen, table, others, page_groups)
    keys = chosen.long()
    safe = keys.clamp_min(0)
    pages = table.gather(1, torch.div(safe, page_groups, rounding_mode="floor"))
    rows = torch.where(keys >= 0, pages * page_groups + safe % page_groups, -1)
    return rows.int(), torch.stack([(keys >= 0).sum(1, dtype=torch.int32), others], 1)
