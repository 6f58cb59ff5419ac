"""Sums over equal ids: one program a distinct id, in order and without atomics."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum(values, order, ends, sums, width, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(ends + row - 1, mask=row > 0, other=0)
    end = tl.load(ends + row)
    d = tl.arange(0, WIDTH)
    acc = tl.zeros((WIDTH,), WIDE)
    for x in tl.range(begin, end, BLOCK):
        j = x + tl.arange(0, BLOCK)
        at = tl.load(order + j, mask=j < end, other=0)
        keep = (j < end)[:, None] & (d < width)[None, :]
        part = tl.load(values + at[:, None] * width + d[None, :], mask=keep, other=0.0)
        acc += tl.sum(part.to(WIDE), 0)
    tl.store(sums + row * width + d, acc, mask=d < width)


def launch(values: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Sums [U, w] of values listed by `order` [N], of each sum up to `ends` [U], all int64."""
    double = values.dtype == torch.float64
    width = values.shape[1]
    sums = torch.empty(
        (len(ends), width), dtype=torch.promote_types(values.dtype, torch.float32), device=values.device
    )
    if len(ends):
        _sum[(len(ends),)](
            values,
            order,
            ends,
            sums,
            width,
            WIDTH=triton.next_power_of_2(width),
            BLOCK=16,
            WIDE=tl.float64 if double else tl.float32,
            num_warps=2,
        )
    return sums
