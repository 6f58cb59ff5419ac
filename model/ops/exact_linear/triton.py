"""A product whose every row is the same bits for any number of rows.

The sum over K is cut into a number of parts that depends on the matrix alone. With few rows the parts are
programs of their own, the last of which to arrive adds them up, with many one program does; the order is
the same. How large a tile is, and how deep a step, changes no bit.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.side import arrivals
from model.ops.tile import operand, round_bf16

_COLUMNS, _DEPTH = 64, 128
_FEW_ROWS = 256


def parts(columns: int, depth: int) -> int:
    """Into how many parts the sum of a matrix [columns, depth] is cut.

    A part has two steps at least: where it has one, the compiler lets the product with many rows add to the
    parts before it, which rounds in another order than adding up parts does.
    """
    count, tiles = 1, triton.cdiv(columns, _COLUMNS)
    while count < 8 and tiles * count < 128 and depth % (2 * count * _DEPTH) == 0:
        if depth // count < 4 * _DEPTH:
            break
        count *= 2
    return count


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, second, out, partial, counters, rows, columns, border, x_row, x_batch, w_batch, out_row,
    out_batch, K: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    product_part(
        tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(0), x, weight,
        second, out, partial, counters, rows, columns, border, x_row, x_batch, w_batch, out_row, out_batch, K,
        PARTS, TOGETHER, PAIR, ROWS, COLUMNS, DEPTH, GROUP,
    )  # fmt: skip


@triton.jit
def product_part(
    program, first, batch, programs, x, weight, second, out, partial, counters, rows, columns, border, x_row,
    x_batch, w_batch, out_row, out_batch, K: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr,
    PAIR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Part `first` of tile `program`; columns from `border` on are those of the matrix `second` (PAIR)."""
    across = tl.cdiv(columns, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    group = program // (GROUP * across)
    size = tl.minimum(down - group * GROUP, GROUP)
    m = (group * GROUP + program % (GROUP * across) % size) * ROWS + tl.arange(0, ROWS)
    n_first = (program % (GROUP * across) // size) * COLUMNS
    n = n_first + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    present = (m < rows)[:, None]
    a = x + batch * x_batch + m.to(tl.int64)[:, None] * x_row + k[None, :]
    if PAIR:
        weight = tl.where(n_first < border, weight, second - border * K)
    b = weight + batch * w_batch + tl.minimum(n, columns - 1).to(tl.int64)[None, :] * K + k[:, None]
    PART: tl.constexpr = K // PARTS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for p in tl.range(first, (PARTS if TOGETHER else first + 1)):
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.range(0, PART, DEPTH):
            at = p * PART + j
            inside = k < K - at
            left = operand(tl.load(a + at, mask=present & inside[None, :], other=0.0))
            right = operand(tl.load(b + at, mask=inside[:, None], other=0.0))
            acc = tl.dot(left, right, acc)
        total += acc
    keep = present & (n < columns)[None, :]
    place = out + batch * out_batch + m.to(tl.int64)[:, None] * out_row + n[None, :]
    if TOGETHER:
        _store(place, total, keep)
    else:
        tile = batch * programs + program
        inner = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        own = partial + tile * (PARTS * ROWS * COLUMNS) + inner
        tl.store(own + first * (ROWS * COLUMNS), total, mask=keep)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1)
        if arrived == PARTS - 1:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for q in tl.static_range(PARTS):
                total += tl.load(own + q * (ROWS * COLUMNS), mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            _store(place, total, keep)


@triton.jit
def _store(place, total, keep):
    if place.dtype.element_ty == tl.bfloat16:
        tl.store(place, round_bf16(total).to(tl.bfloat16), mask=keep)
    else:
        tl.store(place, total, mask=keep)


def product(x: Tensor, weight: Tensor, out: Tensor, second: Tensor | None = None) -> Tensor:
    """[G, T, K] times [G, N, K] into `out` [G, T, N] (bf16 or fp32); all contiguous along their last dim.

    With `second` [1, M, K] also the product with it, beside the first in `out` [1, T, N + M].
    """
    groups, rows, depth = x.shape
    border, columns = weight.shape[1], out.shape[2]
    assert x.stride(2) == out.stride(2) == 1 and weight.is_contiguous()
    cut = parts(border, depth)
    few = rows <= _FEW_ROWS
    together = cut == 1 or not few
    if few:
        # No more stages than a part has steps: the fewer of them, the more programs share a processor.
        block, wide, step, warps, stages = 64, _COLUMNS, _DEPTH, 4, min(4, depth // cut // _DEPTH + 1)
    elif second is not None or columns <= _COLUMNS:
        block, wide, step, warps, stages = 128, _COLUMNS, _DEPTH, 8, 3
    elif cut > 1 or columns < 4096:
        block, wide, step, warps, stages = 128, 128, 64, 8, 4
    else:
        # One part needs one accumulator, which leaves registers for more columns.
        block, wide, step, warps, stages = 128, 256, 64, 8, 3
    tiles = triton.cdiv(rows, block) * triton.cdiv(columns, wide)
    partial = out if together else torch.empty(
        (groups * tiles * cut, block, wide), dtype=torch.float32, device=x.device
    )  # fmt: skip
    counters = out if together else arrivals(x.device, groups * tiles)
    _product[(tiles, 1 if together else cut, groups)](
        x, weight, weight if second is None else second, out, partial, counters, rows, columns, border,
        x.stride(1), x.stride(0), weight.stride(0), out.stride(1), out.stride(0), K=depth, PARTS=cut,
        TOGETHER=together, PAIR=second is not None, ROWS=block, COLUMNS=wide,
        DEPTH=min(step, triton.next_power_of_2(depth)), GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def pairs(first: Tensor, second: Tensor) -> bool:
    """Whether one product serves two matrices [N, K] and [M, K], each with the bits of its own."""
    (n, depth), m = first.shape, len(second)
    return n % _COLUMNS == 0 and parts(n, depth) == parts(m, depth)
