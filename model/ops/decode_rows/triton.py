"""One program a sequence turns chosen keys into rows."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows(
    chosen, table, blocks, rows, counts, pages, candidates, K: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    key = tl.load(chosen + b * K + c, mask=c < K, other=-1)
    given = key >= 0
    if LISTED:
        block = tl.load(blocks + b * candidates + tl.where(given, key // SIZE, 0), mask=given, other=0)
        key = block * SIZE + key % SIZE
    page = tl.load(table + b * pages + tl.where(given, key // GROUPS, 0), mask=given, other=0).to(tl.int32)
    tl.store(rows + b * K + c, tl.where(given, page * GROUPS + key % GROUPS, -1), mask=c < K)
    tl.store(counts + b, tl.sum(given.to(tl.int32), 0))


def decode_rows(
    chosen: Tensor, table: Tensor, page_groups: int, blocks: Tensor | None, block_size: int
) -> tuple[Tensor, Tensor]:
    """See `model.ops.decode_rows.decode_rows`."""
    count, keys = chosen.shape
    rows = torch.empty_like(chosen)
    counts = torch.empty(count, dtype=torch.int32, device=chosen.device)
    _rows[(count,)](
        chosen.contiguous(), table, chosen if blocks is None else blocks.contiguous(), rows, counts,
        table.shape[1], 0 if blocks is None else blocks.shape[1], K=keys, GROUPS=page_groups, SIZE=block_size,
        LISTED=blocks is not None, BLOCK=triton.next_power_of_2(keys), num_warps=4,
    )  # fmt: skip
    return rows, counts
