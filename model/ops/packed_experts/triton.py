"""Products of grouped rows with FP4 matrices: a matrix is read as it is stored and decoded in registers.

Of 32 columns the first 16 stand in low nibbles and the others in high nibbles, so a product is the sum of
two: of the first halves of both sides and of the second ones. The right matrix for a group is found by its
number: packed ones first, plain ones behind them.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.experts.plan import Plan
from model.ops.packed_experts.stack import Stack
from model.ops.tile import KEY_SCALE, e2m1_halves, operand, round_bf16, scale_groups, ue8m0_scale
from model.quant.blocks import round_activation


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of a step, and so on."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swapped: bool
    """Whether the matrix is the left side of the product, which then has its columns as rows."""


# Chosen by the number of tokens alone, never by where they went; exact mode has one for all.
FEW = Tile(rows=16, columns=128, depth=128, warps=4, stages=4, swapped=True)
MANY = Tile(rows=64, columns=128, depth=128, warps=4, stages=3, swapped=False)
EXACT = MANY
_FEW_TOKENS = 256


def tile_of(tokens: int, exact: bool) -> Tile:
    """The tile that serves a number of tokens."""
    return EXACT if exact else FEW if tokens <= _FEW_TOKENS else MANY


@triton.jit
def _dot(x, matrix, acc, SWAPPED: tl.constexpr):
    """Rows [R, K] times matrix [C, K], added to [R, C], or [C, R] when swapped."""
    if SWAPPED:  # noqa: SIM108
        acc = tl.dot(matrix, tl.trans(x), acc)
    else:
        acc = tl.dot(x, tl.trans(matrix), acc)
    return acc


@triton.jit
def _decoded(codes, scales, COLUMNS: tl.constexpr, PAIRS: tl.constexpr):
    """First and second halves [COLUMNS, PAIRS] of a packed tile's blocks, times 2^-8."""
    low, high = e2m1_halves(tl.load(codes))
    scale = ue8m0_scale(tl.load(scales))
    return scale_groups(low, scale, COLUMNS, PAIRS, 16), scale_groups(high, scale, COLUMNS, PAIRS, 16)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAPPED: tl.constexpr):
    if SWAPPED:  # noqa: SIM108
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    return acc


@triton.jit
def _tile_rows(ends, groups, GP: tl.constexpr, ROWS: tl.constexpr):
    """Group of this program's tile, its first row and the group's end; -1 where there is no such tile.

    Tiles are counted from the last group: shared experts, whose matrices are larger, begin first.
    """
    e = tl.arange(0, GP)
    last = tl.load(ends + e, mask=e < groups, other=0)
    first = tl.load(ends + e - 1, mask=(e > 0) & (e < groups), other=0)
    tiles = tl.where(e < groups, (last - first + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, 0)
    t = tl.sum(tiles, 0) - 1 - tl.program_id(1)
    g = tl.sum((upto <= t).to(tl.int32), 0)
    here = e == g
    begin = tl.sum(tl.where(here, first + (t - upto + tiles) * ROWS, 0), 0)
    return tl.where(t < 0, -1, g), begin, tl.sum(tl.where(here, last, 0), 0)


@triton.jit
def _expert_product(
    x, codes, scales, plain, tokens, place, weights, ends, out, limit, groups, E: tl.constexpr,
    GP: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, D: tl.constexpr, N: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PLAIN: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Rows of an expert times its matrix; PAIR: gathered tokens times gate and up, activated and weighted."""
    g, begin, end = _tile_rows(ends, groups, GP, ROWS)
    if g < 0:
        return
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    PAIRS: tl.constexpr = DEPTH // 2
    TOTAL: tl.constexpr = N * 2 if PAIR else N
    row = begin + tl.arange(0, ROWS)
    inside = row < end
    source = tl.where(inside, row, begin)
    if PAIR:
        source = tl.load(tokens + source)
    line = source.to(tl.int64)[:, None]
    acc = _zeros(ROWS, COLUMNS, SWAPPED)
    up = _zeros(ROWS, COLUMNS, SWAPPED)
    if g < E:
        base = g.to(tl.int64) * TOTAL
        j = tl.arange(0, PAIRS)
        left = x + line * D + (j // 16 * 32 + j % 16)[None, :]
        c = codes + (base + n[:, None]) * (D // 2) + tl.arange(0, PAIRS)[None, :]
        s = scales + (base + n[:, None]) * (D // 32) + tl.arange(0, DEPTH // 32)[None, :]
        for d in tl.range(0, D // DEPTH):
            first = operand(tl.load(left + d * DEPTH))
            second = operand(tl.load(left + 16 + d * DEPTH))
            low, high = _decoded(c + d * PAIRS, s + d * (DEPTH // 32), COLUMNS, PAIRS)
            acc = _dot(first, low, acc, SWAPPED)
            acc = _dot(second, high, acc, SWAPPED)
            if PAIR:
                low, high = _decoded(
                    c + N * (D // 2) + d * PAIRS, s + N * (D // 32) + d * (DEPTH // 32), COLUMNS, PAIRS
                )
                up = _dot(first, low, up, SWAPPED)
                up = _dot(second, high, up, SWAPPED)
        acc = acc * KEY_SCALE
        up = up * KEY_SCALE
    else:
        base = (g - E).to(tl.int64) * TOTAL
        rows = x + line * D + tl.arange(0, PLAIN)[None, :]
        matrix = plain + (base + n[:, None]) * D + tl.arange(0, PLAIN)[None, :]
        for d in tl.range(0, D, PLAIN):
            a = operand(tl.load(rows + d))
            acc = _dot(a, operand(tl.load(matrix + d)), acc, SWAPPED)
            if PAIR:
                up = _dot(a, operand(tl.load(matrix + N * D + d)), up, SWAPPED)
    if SWAPPED:
        acc = tl.trans(acc)
        up = tl.trans(up)
    if PAIR:
        scale = tl.full((ROWS,), 1.0, tl.float32)
        for j in tl.static_range(K):
            here = tl.load(place + source * KS + j, mask=inside, other=-1) == row
            scale = tl.where(here, tl.load(weights + source * K + j, mask=inside, other=0.0), scale)
        gate = tl.minimum(round_bf16(acc).to(tl.float32), limit)
        up = tl.minimum(tl.maximum(round_bf16(up).to(tl.float32), -limit), limit)
        acc = gate / (1.0 + tl.exp(-gate)) * up * scale[:, None]
    target = out + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, round_bf16(acc).to(out.dtype.element_ty), mask=inside[:, None])


def packed_experts(
    x: Tensor,
    w13: Stack,
    w2: Stack,
    weights: Tensor,
    plan: Plan,
    *,
    limit: float,
    rounded: bool,
    exact: bool,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """See `model.ops.packed_experts.packed_experts`; `tiles` replace those of the products (to measure)."""
    width, inner = x.shape[1], w2.shape[2]
    first, second = tiles or (tile_of(len(x), exact),) * 2
    x = (round_activation(x) if rounded else x).contiguous()
    active = _product(x, w13, weights, plan, limit, inner, True, first)
    active = round_activation(active) if rounded else active
    return _product(active, w2, weights, plan, limit, width, False, second)


def _product(
    x: Tensor, stack: Stack, weights: Tensor, plan: Plan, limit: float, columns: int, pair: bool, tile: Tile
) -> Tensor:
    """[n, columns] of tokens (`pair`) or of rows in the order of `plan`."""
    groups, _, depth = stack.shape
    out = torch.empty((len(plan.tokens), columns), dtype=x.dtype, device=x.device)
    wide = min(tile.columns // (2 if pair else 1), columns & -columns)
    step = min(tile.depth, depth & -depth)
    items = len(plan.tokens)
    # Plain matrices are read in steps of as many bytes, lest they take the shared memory that decides how
    # many programs a processor runs.
    plain = max(16, step // (4 if tile.rows <= 16 else 2))
    # At most one tile begun for each group that has rows, and the whole ones.
    tiles = min(items, groups) + items // tile.rows
    _expert_product[(columns // wide, tiles)](
        x, stack.codes, stack.scales, stack.plain, plan.tokens, plan.place, weights,
        plan.ends, out, limit, groups, E=len(stack.codes), GP=triton.next_power_of_2(groups),
        K=weights.shape[1], KS=plan.place.shape[1], D=depth, N=columns, PAIR=pair, ROWS=tile.rows,
        COLUMNS=wide, DEPTH=step, PLAIN=plain, SWAPPED=tile.swapped, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out
