"""Definition of index scores read from packed, paged index records."""

import torch
from torch import Tensor

from model.ops.indexer.reference import index_scores
from model.ops.records import unpack


def rows_of(table: Tensor, positions: Tensor, page_groups: int) -> Tensor:
    """Rows [B, N] of the records of entry `positions` [B, N] of sequences on the pages `table` [B, P]."""
    pages = table.gather(1, torch.div(positions, page_groups, rounding_mode="floor"))
    return pages * page_groups + positions % page_groups


def decode_scores(
    query: Tensor,
    weights: Tensor,
    records: Tensor,
    table: Tensor,
    ends: Tensor,
    *,
    width: int,
    page_groups: int,
    blocks: Tensor | None,
    block_size: int,
    factor: float,
) -> Tensor:
    """See `model.ops.index_decode.decode_scores`."""
    weights = weights * factor
    column = torch.arange(width, device=query.device).expand(len(query), width)
    positions, given = column, column >= 0
    if blocks is not None:
        chosen = blocks.long().repeat_interleave(block_size, 1)[:, :width]
        positions, given = chosen * block_size + column % block_size, chosen >= 0
    given = given & (positions < ends[:, None])
    rows = rows_of(table, positions.masked_fill(~given, 0), page_groups)
    scores = [
        index_scores(q[None], unpack("index", records[r]), w[None])[0]
        for q, w, r in zip(query, weights, rows, strict=True)
    ]
    return torch.stack(scores).masked_fill(~given, float("-inf"))
