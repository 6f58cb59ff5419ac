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
    chosen, table, others, rows, counts, pages, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    key = tl.load(chosen + b * K + c, mask=c < K, other=-1)
    given = key >= 0
    page = tl.load(table + b * pages + tl.where(given, key // GROUPS, 0), mask=given, other=0).to(tl.int32)
    tl.store(rows + b * K + c, tl.where(given, page * GROUPS + key % GROUPS, -1), mask=c < K)
    tl.store(counts + 2 * b, tl.sum(given.to(tl.int32), 0))
    tl.store(counts + 2 * b + 1, tl.load(others + b))


def decode_rows(chosen: Tensor, table: Tensor, others: Tensor, page_groups: int) -> tuple[Tensor, Tensor]:
    """See `model.ops.decode_rows.decode_rows`."""
    count, keys = chosen.shape
    rows = torch.empty_like(chosen)
    counts = torch.empty((count, 2), dtype=torch.int32, device=chosen.device)
    _rows[(count,)](
        chosen.contiguous(), table, others, rows, counts, table.shape[1],
        K=keys, GROUPS=page_groups, BLOCK=triton.next_power_of_2(keys), num_warps=4,
    )  # fmt: skip
    return rows, counts
