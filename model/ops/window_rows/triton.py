"""The rows of window records in one launch: as tensor operations they would be twenty."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _window_rows(
    slots,
    positions,
    floors,
    rows,
    counts,
    batch,
    floor_stride,
    entries,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, kind = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + b)
    oldest = tl.maximum(position - (WINDOW - 1), tl.load(floors + kind * floor_stride + b))
    w = tl.arange(0, BLOCK)
    place = oldest + w
    row = tl.where(place <= position, tl.load(slots + b) * entries + place % entries, -1)
    at = (kind * batch + b).to(tl.int64)
    tl.store(rows + at * WINDOW + w, row.to(tl.int32), mask=w < WINDOW)
    tl.store(counts + at, (position - oldest + 1).to(tl.int32))


def window_rows(
    slots: Tensor, positions: Tensor, floors: Tensor, entries: int, window: int
) -> tuple[Tensor, Tensor]:
    """See `model.ops.window_rows.window_rows`."""
    kinds, batch = floors.shape
    assert floors.stride(1) == 1
    rows = torch.empty((kinds, batch, window), dtype=torch.int32, device=slots.device)
    counts = torch.empty((kinds, batch), dtype=torch.int32, device=slots.device)
    _window_rows[(batch, kinds)](
        slots, positions, floors, rows, counts, batch, floors.stride(0), entries, WINDOW=window,
        BLOCK=triton.next_power_of_2(window), num_warps=1,
    )  # fmt: skip
    return rows, counts
