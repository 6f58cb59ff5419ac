"""A product whose every row is the same bits for any number of rows.

The sum over K is cut into a number of parts that depends on the matrix alone. With few rows the parts are
programs of their own, with many one program adds them up; the order is the same.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.tile import operand, round_bf16

_COLUMNS, _DEPTH = 64, 128
_FEW_ROWS = 256


def parts(columns: int, depth: int) -> int:
    """Into how many parts the sum of a matrix [columns, depth] is cut."""
    count = 1
    while count < 8 and triton.cdiv(columns, _COLUMNS) * count < 128 and depth % (2 * count * _DEPTH) == 0:
        count *= 2
    return count


@triton.jit
def _product(
    x, weight, out, partial, rows, columns, x_row, x_batch, w_batch, out_row, out_batch, K: tl.constexpr,
    PARTS: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    group = program // (GROUP * across)
    size = tl.minimum(down - group * GROUP, GROUP)
    m = (group * GROUP + program % (GROUP * across) % size) * ROWS + tl.arange(0, ROWS)
    n = (program % (GROUP * across) // size) * COLUMNS + tl.arange(0, COLUMNS)
    batch = tl.program_id(2).to(tl.int64)
    k = tl.arange(0, DEPTH)
    a = x + batch * x_batch + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * x_row + k[None, :]
    b = weight + batch * w_batch + tl.minimum(n, columns - 1).to(tl.int64)[None, :] * K + k[:, None]
    PART: tl.constexpr = K // PARTS
    first = tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for p in tl.range(first, (PARTS if TOGETHER else first + 1)):
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.range(0, PART, DEPTH):
            at = p * PART + j
            inside = k < K - at
            left = operand(tl.load(a + at, mask=inside[None, :], other=0.0))
            right = operand(tl.load(b + at, mask=inside[:, None], other=0.0))
            acc = tl.dot(left, right, acc)
        total += acc
    keep = (m < rows)[:, None] & (n < columns)[None, :]
    if TOGETHER:
        place = out + batch * out_batch + m.to(tl.int64)[:, None] * out_row + n[None, :]
        if out.dtype.element_ty == tl.bfloat16:
            tl.store(place, round_bf16(total).to(tl.bfloat16), mask=keep)
        else:
            tl.store(place, total, mask=keep)
    else:
        place = partial + ((batch * PARTS + first) * rows + m.to(tl.int64)[:, None]) * columns + n[None, :]
        tl.store(place, total, mask=keep)


@triton.jit
def _add(
    partial, out, rows, columns, out_row, out_batch, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(2).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for p in tl.static_range(PARTS):
        at = ((batch * PARTS + p) * rows + m) * columns + n
        total += tl.load(partial + at, mask=n < columns, other=0.0)
    place = out + batch * out_batch + m * out_row + n
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(place, round_bf16(total).to(tl.bfloat16), mask=n < columns)
    else:
        tl.store(place, total, mask=n < columns)


def product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """[G, T, K] times [G, N, K] into `out` [G, T, N] (bf16 or fp32); all contiguous along their last dim."""
    groups, rows, depth = x.shape
    columns = weight.shape[1]
    assert x.stride(2) == out.stride(2) == 1 and weight.is_contiguous()
    cut = parts(columns, depth)
    few = rows <= _FEW_ROWS
    together = cut == 1 or not few
    block, warps, stages = (64, 4, 4) if few else (128, 8, 3)
    partial = out if together else torch.empty(
        (groups, cut, rows, columns), dtype=torch.float32, device=x.device
    )  # fmt: skip
    grid = (triton.cdiv(rows, block) * triton.cdiv(columns, _COLUMNS), 1 if together else cut, groups)
    _product[grid](
        x, weight, out, partial, rows, columns, x.stride(1), x.stride(0), weight.stride(0), out.stride(1),
        out.stride(0), K=depth, PARTS=cut, TOGETHER=together, ROWS=block, COLUMNS=_COLUMNS,
        DEPTH=min(_DEPTH, triton.next_power_of_2(depth)), GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if not together:
        width = min(1024, triton.next_power_of_2(columns))
        _add[(rows, triton.cdiv(columns, width), groups)](
            partial, out, rows, columns, out.stride(1), out.stride(0), PARTS=cut, BLOCK=width, num_warps=4
        )
    return out
