"""Sums over equal ids: one program a distinct id, in order and without atomics."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

SHORT, LONG, WARPS = 8, 64, 4
"""Lookups summed at once for an id that has few, and for one that has many."""


@triton.jit
def _part(values, order, first, end, d, width, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Sum of the values of BLOCK lookups from `first`, before `end`."""
    j = first + tl.arange(0, BLOCK)
    at = tl.load(order + j, mask=j < end, other=0)
    keep = (j < end)[:, None] & (d < width)[None, :]
    return tl.sum(tl.load(values + at[:, None] * width + d[None, :], mask=keep, other=0.0).to(WIDE), 0)


@triton.jit
def _sum(
    values,
    order,
    ends,
    sums,
    width,
    WIDTH: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(ends + row - 1, mask=row > 0, other=0)
    end = tl.load(ends + row)
    d = tl.arange(0, WIDTH)
    if end - begin <= SHORT:
        acc = _part(values, order, begin, end, d, width, SHORT, WIDE)
    else:
        acc = tl.zeros((WIDTH,), WIDE)
        for first in tl.range(begin, end, LONG):
            acc += _part(values, order, first, end, d, width, LONG, WIDE)
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
            SHORT=SHORT,
            LONG=LONG,
            WIDE=tl.float64 if double else tl.float32,
            num_warps=WARPS,
        )
    return sums
