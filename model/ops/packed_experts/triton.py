"""Products of grouped rows with FP4 matrices: a matrix is read as it is stored and decoded in registers.

The matrix is the left side of the product, because tensor cores take that side from registers. A tile of
32-bit words holds eight columns a word, so a product is the sum of eight, one for each nibble. The matrix of
a group is found by its number: packed ones first, plain ones behind them.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.experts.activation import activate, weights_of
from model.ops.experts.plan import Plan
from model.ops.packed_experts.stack import Stack
from model.ops.tile import (
    KEY_SCALE,
    constant_bf16,
    e2m1_words,
    operand,
    round_bf16,
    scale_groups,
    ue8m0_scale,
)
from model.quant.blocks import round_activation


@dataclass(frozen=True)
class Tile:
    """Rows (of tokens), columns (of results) and depth of a step, and so on."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Chosen by the number of tokens alone, never by where they went; exact mode has one for all, for decoding.
ALONE = Tile(rows=8, columns=64, depth=256, warps=4, stages=4)
FEW = Tile(rows=8, columns=128, depth=256, warps=4, stages=3)
SOME = Tile(rows=16, columns=128, depth=256, warps=4, stages=3)
MANY = Tile(rows=32, columns=128, depth=128, warps=4, stages=3)
EXACT = FEW
_UP_TO = ((4, ALONE), (512, FEW), (1536, SOME))
WIDTHS = 128
"""Matrices must have a multiple of so many columns: 16 words, the least depth of a product."""


def tile_of(tokens: int, exact: bool) -> Tile:
    """The tile that serves a number of tokens."""
    return EXACT if exact else next((tile for most, tile in _UP_TO if tokens <= most), MANY)


@triton.jit
def _nibble(acc, x, values, scale, COLUMNS: tl.constexpr, WORDS: tl.constexpr):
    """Add to [C, R] the product of one nibble's values [C, W], scaled [C, W / 4], and its tokens [R, W]."""
    scaled = scale_groups(values, scale, COLUMNS, WORDS, 4)
    return tl.dot(scaled, tl.trans(operand(tl.load(x))), acc)


@triton.jit
def _tile_rows(tile, ends, groups, GP: tl.constexpr, ROWS: tl.constexpr):
    """Group of a tile, its first row and the group's end; -1 where there is no such tile.

    Tiles are counted from the last group: shared experts, whose matrices are larger, begin first.
    """
    e = tl.arange(0, GP)
    last = tl.load(ends + e, mask=e < groups, other=0)
    first = tl.load(ends + e - 1, mask=(e > 0) & (e < groups), other=0)
    tiles = tl.where(e < groups, (last - first + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, 0)
    t = tl.sum(tiles, 0) - 1 - tile
    g = tl.sum((upto <= t).to(tl.int32), 0)
    here = e == g
    begin = tl.sum(tl.where(here, first + (t - upto + tiles) * ROWS, 0), 0)
    return tl.where(t < 0, -1, g), begin, tl.sum(tl.where(here, last, 0), 0)


@triton.jit
def _expert_product(
    x, words, scales, plain, tokens, place, weights, ends, out, limit, groups, E: tl.constexpr,
    GP: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, D: tl.constexpr, N: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Rows of an expert times its matrix; PAIR: gathered tokens times gate and up, activated and weighted."""
    # Rows of gate and up take turns, so that both are one tile.
    WIDE: tl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    strip = tl.program_id(0) % (N // WIDE) * WIDE
    g, begin, end = _tile_rows(tl.program_id(0) // (N // WIDE), ends, groups, GP, ROWS)
    if g < 0:
        return
    row = begin + tl.arange(0, ROWS)
    inside = row < end
    source = tl.where(inside, row, begin)
    if PAIR:
        source = tl.load(tokens + source)
    line = source.to(tl.int64)[:, None]
    c = tl.arange(0, COLUMNS)
    n = strip + (c // 2 + c % 2 * N if PAIR else c)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    if g < E:
        matrix = (g.to(tl.int64) * (N * 2 if PAIR else N) + n)[:, None]
        W: tl.constexpr = DEPTH // 8
        j = tl.arange(0, W)
        w = words + matrix * (D // 8) + j[None, :]
        s = scales + matrix * (D // 32) + tl.arange(0, DEPTH // 32)[None, :]
        left = x + line * D + (j // 4 * 32 + j % 4)[None, :]
        for d in tl.range(0, D // DEPTH):
            n0, n1, n2, n3, n4, n5, n6, n7 = e2m1_words(tl.load(w + d * W))
            scale = ue8m0_scale(tl.load(s + d * (DEPTH // 32)))
            at = left + d * DEPTH
            acc = _nibble(acc, at, n0, scale, COLUMNS, W)
            acc = _nibble(acc, at + 4, n1, scale, COLUMNS, W)
            acc = _nibble(acc, at + 8, n2, scale, COLUMNS, W)
            acc = _nibble(acc, at + 12, n3, scale, COLUMNS, W)
            acc = _nibble(acc, at + 16, n4, scale, COLUMNS, W)
            acc = _nibble(acc, at + 20, n5, scale, COLUMNS, W)
            acc = _nibble(acc, at + 24, n6, scale, COLUMNS, W)
            acc = _nibble(acc, at + 28, n7, scale, COLUMNS, W)
        acc = acc * KEY_SCALE
    else:
        k = tl.arange(0, PLAIN)[None, :]
        shared = plain + ((g - E).to(tl.int64) * (N * 2 if PAIR else N) + n)[:, None] * D + k
        rows = x + line * D + k
        for d in tl.range(0, D, PLAIN):
            a = operand(tl.load(shared + d))
            acc = tl.dot(a, tl.trans(operand(tl.load(rows + d))), acc)
    result = tl.trans(acc)
    if PAIR:
        gate, up = tl.split(tl.reshape(result, (ROWS, WIDE, 2)))
        factor = weights_of(row, source, inside, place, weights, K, KS)
        result = activate(gate, up, limit) * factor[:, None]
    column = strip + tl.arange(0, WIDE)
    target = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(target, round_bf16(result).to(out.dtype.element_ty), mask=inside[:, None])


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
    active = product(x, w13, weights, plan, limit, inner, True, first)
    active = round_activation(active) if rounded else active
    return product(active, w2, weights, plan, limit, width, False, second)


def product(
    x: Tensor, stack: Stack, weights: Tensor, plan: Plan, limit: float, columns: int, pair: bool, tile: Tile
) -> Tensor:
    """[n, columns] of tokens (`pair`) or of rows in the order of `plan`."""
    groups, rows, depth = stack.shape
    items = len(plan.tokens)
    out = torch.empty((items, columns), dtype=x.dtype, device=x.device)
    # A step divides the depth, a tile the columns.
    step, wide = min(tile.depth, depth & -depth), min(tile.columns, rows & -rows)
    # Plain matrices are read in steps of as many bytes, lest they take the shared memory that decides how
    # many programs a processor runs.
    plain = max(16, step // (4 if tile.rows < 32 else 2))
    # At most one tile begun for each group that has rows, and the whole ones.
    tiles = min(items, groups) + items // tile.rows
    _expert_product[(tiles * (rows // wide),)](
        x, stack.codes.view(torch.int32), stack.scales, stack.plain, plan.tokens, plan.place, weights,
        plan.ends, out, limit, groups, E=len(stack.codes), GP=triton.next_power_of_2(groups),
        K=weights.shape[1], KS=plan.place.shape[1], D=depth, N=columns, PAIR=pair, ROWS=tile.rows,
        COLUMNS=wide, DEPTH=step, PLAIN=plain, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _unpack(words, scales, out, total, BLOCK: tl.constexpr):
    w = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block = tl.program_id(0).to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    n0, n1, n2, n3, n4, n5, n6, n7 = e2m1_words(tl.load(words + w, mask=w < total, other=0))
    lower = tl.join(tl.join(n0, n1), tl.join(n2, n3))
    upper = tl.join(tl.join(n4, n5), tl.join(n6, n7))
    # [words, 8] by nibble, then the columns of each block in order.
    values = tl.reshape(tl.permute(tl.join(lower, upper), (0, 3, 2, 1)), (BLOCK // 4, 4, 8))
    values = tl.reshape(tl.permute(values, (0, 2, 1)), (BLOCK // 4, 32))
    scale = ue8m0_scale(tl.load(scales + block, mask=block < total // 4, other=0))
    values = values * scale[:, None] * constant_bf16(KEY_SCALE)
    target = out + block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=(block < total // 4)[:, None])


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """Matrices [n, N, K] in bf16, exactly, of codes [n, N, K / 2] and scales [n, N, K / 32]."""
    count, rows, half = codes.shape
    out = torch.empty((count, rows, 2 * half), dtype=torch.bfloat16, device=codes.device)
    words, block = codes.view(torch.int32), 1024
    grid = (triton.cdiv(words.numel(), block),)
    _unpack[grid](words, scales, out, words.numel(), BLOCK=block, num_warps=4)
    return out
