"""Products of rows with the matrix of their expert: gathering, activating and weighting on the way.

The table of row tiles in the plan says which rows a program multiplies, so that the host need not know.
An element is one chain of sums over K in order: a row's bits depend neither on how many rows its expert has
nor on the tile, and few rows, many rows and training agree in every bit.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from model.ops.experts.activation import activate, weights_of
from model.ops.experts.plan import TILE_ROWS, Plan, shape_of
from model.ops.tile import INTERPRET, operand, round_bf16

_COLUMNS, _DEPTH, _GROUP = 256, 64, 4


@triton.jit
def _tile(
    x, block, matrix, tokens, place, weights, out, limit, g, first, end, n, D: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, OF_TOKENS: tl.constexpr, PAIR: tl.constexpr,
    BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] of an expert's rows times its matrix [N, D], or [D, N] if BACK."""
    row = first + tl.arange(0, ROWS)
    inside = row < end
    if OF_TOKENS:
        token = tl.load(tokens + tl.where(inside, row, first)).to(tl.int64)
        left = x + token[:, None] * D + tl.arange(0, DEPTH)[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for d in tl.range(0, D, DEPTH):
        if OF_TOKENS:  # noqa: SIM108
            a = operand(tl.load(left + d))
        else:
            a = operand(block.load([first, d]))
        if BACK:
            acc = tl.dot(a, operand(matrix.load([g * D + d, n])), acc)
        elif PAIR:
            acc = tl.dot(a, tl.trans(operand(matrix.load([g * 2 * N + n, d]))), acc)
            up = tl.dot(a, tl.trans(operand(matrix.load([g * 2 * N + N + n, d]))), up)
        else:
            acc = tl.dot(a, tl.trans(operand(matrix.load([g * N + n, d]))), acc)
    if PAIR:
        acc = activate(acc, up, limit)
        token = tl.load(tokens + row, mask=inside, other=0)
        acc = acc * weights_of(row, token, inside, place, weights, K, KS)[:, None]
    c = n + tl.arange(0, COLUMNS)
    keep = inside[:, None] & (c < N)[None, :]
    target = out + row.to(tl.int64)[:, None] * N + c[None, :]
    tl.store(target, round_bf16(acc).to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["row_tiles"])
def _grouped(
    x, block, half, matrix, tiles, ends, tokens, place, weights, out, limit, row_tiles, D: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, OF_TOKENS: tl.constexpr, PAIR: tl.constexpr,
    BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP row tiles in turn share columns of a matrix; a tile at most half full takes half the work."""
    program = tl.program_id(0)
    columns: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    group = program // (GROUP * columns)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    tile = group * GROUP + program % (GROUP * columns) % size
    n = program % (GROUP * columns) // size * COLUMNS
    g = tl.load(tiles + 2 * tile)
    if g < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    end = tl.load(ends + g)
    if end - first > ROWS // 2:
        _tile(
            x, block, matrix, tokens, place, weights, out, limit, g, first, end, n, D, N, K, KS, OF_TOKENS,
            PAIR, BACK, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
    else:
        _tile(
            x, half, matrix, tokens, place, weights, out, limit, g, first, end, n, D, N, K, KS, OF_TOKENS,
            PAIR, BACK, ROWS // 2, COLUMNS, DEPTH,
        )  # fmt: skip


def plain(
    x: Tensor,
    weight: Tensor,
    plan: Plan,
    *,
    of_tokens: bool = False,
    back: bool = False,
    weights: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """As `model.ops.experts.gluon.specialised`, for all widths that are multiples of 16."""
    pair = weights is not None
    depth, target, tile = shape_of(weight, back, pair, _COLUMNS)
    step = min(_DEPTH, depth & -depth)
    assert step >= 16, f"a width of {depth} is no multiple of 16"
    out = torch.empty((len(plan.tokens), target), dtype=x.dtype, device=x.device)
    matrix, bound = weight.view(-1, weight.shape[2]), len(plan.tiles) - 1
    _grouped[(bound * triton.cdiv(target, tile),)](
        x, *(TensorDescriptor.from_tensor(x, [rows, step]) for rows in (TILE_ROWS, TILE_ROWS // 2)),
        TensorDescriptor.from_tensor(matrix, [step, tile] if back else [tile, step]),
        plan.tiles, plan.ends, plan.tokens, plan.place, x if weights is None else weights, out, limit, bound,
        D=depth, N=target, K=0 if weights is None else weights.shape[1],
        KS=plan.place.shape[1] if pair else 0, OF_TOKENS=of_tokens, PAIR=pair, BACK=back, ROWS=TILE_ROWS,
        COLUMNS=tile, DEPTH=step, GROUP=_GROUP, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out


def _product(depth: int) -> Callable[..., Tensor]:
    """The kernel for sums over `depth`."""
    if INTERPRET or depth % _DEPTH:
        return plain
    from model.ops.experts.gluon import specialised

    return specialised


def grouped(x: Tensor, weight: Tensor, plan: Plan, *, of_tokens: bool = False) -> Tensor:
    """See `model.ops.experts.grouped`."""
    return _product(weight.shape[2])(x, weight, plan, of_tokens=of_tokens)


def activated(x: Tensor, w13: Tensor, weights: Tensor, plan: Plan, limit: float) -> Tensor:
    """See `model.ops.experts.activated`."""
    return _product(w13.shape[2])(x, w13, plan, of_tokens=True, weights=weights, limit=limit)


def input_gradient(grad: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    """Gradient of the rows [n, K] from that of their products [n, N] with `weight` [G, N, K]."""
    return _product(weight.shape[1])(grad, weight, plan, back=True)


@triton.jit
def _weight_gradient(
    grad, x, left, right, ends, out, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A [TALL, WIDE] tile of the sum over an expert's rows of gradient [N] times input [D]."""
    g = tl.program_id(1)
    wide: tl.constexpr = (D + WIDE - 1) // WIDE
    n = tl.program_id(0) // wide * TALL
    d = tl.program_id(0) % wide * WIDE
    end = tl.load(ends + g)
    start = tl.where(g == 0, 0, tl.load(ends + tl.maximum(g - 1, 0)))
    cn, cd = n + tl.arange(0, TALL), d + tl.arange(0, WIDE)
    whole = start + (end - start) // ROWS * ROWS
    acc = tl.zeros((TALL, WIDE), tl.float32)
    for r in tl.range(start, whole, ROWS):
        acc = tl.dot(tl.trans(operand(left.load([r, n]))), operand(right.load([r, d])), acc)
    if whole < end:
        row = whole + tl.arange(0, ROWS)
        inside = (row < end)[:, None]
        at = row.to(tl.int64)[:, None]
        a = tl.load(grad + at * N + cn[None, :], mask=inside & (cn < N)[None, :], other=0.0)
        b = tl.load(x + at * D + cd[None, :], mask=inside & (cd < D)[None, :], other=0.0)
        acc = tl.dot(tl.trans(operand(a)), operand(b), acc)
    target = out + (g.to(tl.int64) * N + cn)[:, None] * D + cd[None, :]
    tl.store(target, round_bf16(acc).to(out.dtype.element_ty), mask=(cn < N)[:, None] & (cd < D)[None, :])


def weight_gradient(grad: Tensor, x: Tensor, plan: Plan) -> Tensor:
    """Gradient of the matrices [G, N, K] from that of products [n, N] and from their rows [n, K]."""
    height, width = grad.shape[1], x.shape[1]
    out = torch.empty((len(plan.ends), height, width), dtype=x.dtype, device=x.device)
    tall, wide, rows = 128, 128, 64
    blocks = [TensorDescriptor.from_tensor(t, [rows, w]) for t, w in ((grad, tall), (x, wide))]
    _weight_gradient[(triton.cdiv(height, tall) * triton.cdiv(width, wide), len(plan.ends))](
        grad, x, *blocks, plan.ends, out, N=height, D=width, ROWS=rows, TALL=tall, WIDE=wide, num_warps=8,
        num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _few(
    x, matrix, tokens, place, weights, ends, out, limit, K: tl.constexpr, KS: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, PAIR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows of an expert times its matrix, which is the tall side; PAIR: tokens, activated and weighted."""
    g = tl.program_id(1)
    end = tl.load(ends + g)
    start = tl.where(g == 0, 0, tl.load(ends + tl.maximum(g - 1, 0)))
    n = tl.program_id(0) * COLUMNS
    for m in tl.range(start, end, ROWS):
        row = m + tl.arange(0, ROWS)
        inside = row < end
        source = row
        if PAIR:
            source = tl.load(tokens + row, mask=inside, other=0)
        right = x + source.to(tl.int64)[None, :] * D + tl.arange(0, DEPTH)[:, None]
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        up = tl.zeros((COLUMNS, ROWS), tl.float32)
        for d in tl.range(0, D, DEPTH):
            b = operand(tl.load(right + d, mask=inside[None, :], other=0.0))
            if PAIR:
                acc = tl.dot(operand(matrix.load([g * 2 * N + n, d])), b, acc)
                up = tl.dot(operand(matrix.load([g * 2 * N + N + n, d])), b, up)
            else:
                acc = tl.dot(operand(matrix.load([g * N + n, d])), b, acc)
        if PAIR:
            token = tl.load(tokens + row, mask=inside, other=0)
            scale = weights_of(row, token, inside, place, weights, K, KS)
            acc = activate(acc, up, limit) * scale[None, :]
        target = out + row.to(tl.int64)[None, :] * N + (n + tl.arange(0, COLUMNS))[:, None]
        tl.store(target, round_bf16(acc).to(out.dtype.element_ty), mask=inside[None, :])


FEW = 1024


def few_fits(x: Tensor, w2: Tensor, items: int) -> bool:
    """Whether the kernels for few rows serve the shapes: whole tiles, and no more rows than pay."""
    return items <= FEW and w2.shape[2] % 64 == 0 and x.shape[1] % 64 == 0


def few(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, plan: Plan, limit: float) -> Tensor:
    """The rows [n, d] that `combine` sums, of few tokens [T, d]: two kernels and nothing gathered."""
    items, inner = len(plan.tokens), w2.shape[2]
    active = torch.empty((items, inner), dtype=x.dtype, device=x.device)
    result = torch.empty((items, x.shape[1]), dtype=x.dtype, device=x.device)
    # A matrix is read once for each tile of rows; most experts should have one.
    rows, stages = (16, 4) if items <= 8 * len(plan.ends) else (64, 3)
    for source, weight, out, pair in ((x, w13, active, True), (active, w2, result, False)):
        depth, columns = source.shape[1], out.shape[1]
        step = min(128, depth & -depth)
        matrix = TensorDescriptor.from_tensor(weight.view(-1, depth), [64, step])
        _few[(columns // 64, len(plan.ends))](
            source, matrix, plan.tokens, plan.place, weights, plan.ends, out, limit, K=weights.shape[1],
            KS=plan.place.shape[1], D=depth, N=columns, PAIR=pair, ROWS=rows, COLUMNS=64, DEPTH=step,
            num_warps=4, num_stages=stages,
        )  # fmt: skip
    return result
