"""Logit tiles of student and teacher side by side: per tile two maxima, two sums and sum of p * gap.

Two accumulators of 128 x 128 share the registers that one of 128 x 256 takes in `linear_logprob`.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.logit_tiles import ROWS, TILES, descriptors, logit_tile, raised
from model.ops.tile import LN2, LOG2E, MASKED, round_bf16

COLUMNS = 128


@triton.jit
def _partials(
    hidden,
    weight,
    other,
    head,
    partial,
    count,
    vocabulary,
    tiles,
    inverse_temperature,
    K: tl.constexpr,
    K_OTHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    own, row_tile, column_tile = logit_tile(hidden, weight, count, tiles, 0, K, ROWS, COLUMNS, DEPTH, GROUP)
    theirs, _, _ = logit_tile(other, head, count, tiles, 0, K_OTHER, ROWS, COLUMNS, DEPTH, GROUP)
    r = row_tile * ROWS + tl.arange(0, ROWS)
    c = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = r < count
    exists = (c < vocabulary)[None, :]
    own = tl.where(exists, own * inverse_temperature, MASKED)
    theirs = tl.where(exists, theirs * inverse_temperature, MASKED)
    top = tl.max(own, 1)
    top_other = tl.max(theirs, 1)
    e = tl.exp2((own - top[:, None]) * LOG2E)
    at = partial + column_tile.to(tl.int64) * count + r
    size = tl.cast(tiles, tl.int64) * count
    tl.store(at, top, mask=inside)
    tl.store(at + size, tl.sum(e, 1), mask=inside)
    tl.store(at + 2 * size, tl.sum(e * (own - theirs), 1), mask=inside)
    tl.store(at + 3 * size, top_other, mask=inside)
    tl.store(at + 4 * size, tl.sum(tl.exp2((theirs - top_other[:, None]) * LOG2E), 1), mask=inside)


@triton.jit
def _reduce(partial, kl, lse, lse_other, count, tiles, BLOCK: tl.constexpr):
    """Merge the column tiles of each row in order."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < count
    top = tl.full((BLOCK,), MASKED, tl.float32)
    top_other = tl.full((BLOCK,), MASKED, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    total_other = tl.zeros((BLOCK,), tl.float32)
    gap = tl.zeros((BLOCK,), tl.float32)
    size = tl.cast(tiles, tl.int64) * count
    for v in tl.range(0, tiles):
        at = partial + tl.cast(v, tl.int64) * count + r
        top, old, new = raised(top, tl.load(at, mask=inside, other=0.0))
        total = total * old + tl.load(at + size, mask=inside, other=1.0) * new
        gap = gap * old + tl.load(at + 2 * size, mask=inside, other=0.0) * new
        top_other, old, new = raised(top_other, tl.load(at + 3 * size, mask=inside, other=0.0))
        total_other = total_other * old + tl.load(at + 4 * size, mask=inside, other=1.0) * new
    own = top + tl.log2(total) * LN2
    theirs = top_other + tl.log2(total_other) * LN2
    tl.store(lse + r, own, mask=inside)
    tl.store(lse_other + r, theirs, mask=inside)
    tl.store(kl + r, gap / total - (own - theirs), mask=inside)


@triton.jit
def _logit_gradients(
    hidden,
    weight,
    other,
    head,
    kl,
    lse,
    lse_other,
    grad_kl,
    grad,
    count,
    vocabulary,
    tiles,
    first_column,
    stride,
    inverse_temperature,
    K: tl.constexpr,
    K_OTHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """d/dlogit = g p ((log p - log q) - KL) / temperature; g: gradient of the KL."""
    own, row_tile, column_tile = logit_tile(
        hidden, weight, count, tiles, first_column, K, ROWS, COLUMNS, DEPTH, GROUP
    )
    theirs, _, _ = logit_tile(other, head, count, tiles, first_column, K_OTHER, ROWS, COLUMNS, DEPTH, GROUP)
    r = row_tile * ROWS + tl.arange(0, ROWS)
    local = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = r < count
    g = tl.load(grad_kl + r, mask=inside, other=0.0) * inverse_temperature
    total = tl.load(lse + r, mask=inside, other=0.0)
    shift = total - tl.load(lse_other + r, mask=inside, other=0.0)
    shift += tl.load(kl + r, mask=inside, other=0.0)
    z = own * inverse_temperature
    p = tl.exp2((z - total[:, None]) * LOG2E)
    dz = p * ((z - theirs * inverse_temperature) - shift[:, None]) * g[:, None]
    tl.store(
        grad + r.to(tl.int64)[:, None] * stride + local[None, :],
        round_bf16(dz).to(grad.dtype.element_ty),
        mask=inside[:, None] & (first_column + local < vocabulary)[None, :],
    )


def forward(
    hidden: Tensor, weight: Tensor, other: Tensor, head: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """KL and the log-sum-exp of student and teacher, each [T] fp32."""
    count, vocabulary = len(hidden), len(weight)
    out = torch.empty((3, count), dtype=torch.float32, device=hidden.device)
    if not count:
        return out[0], out[1], out[2]
    tiles = triton.cdiv(vocabulary, COLUMNS)
    partial = torch.empty((5, tiles, count), dtype=torch.float32, device=hidden.device)
    _partials[(triton.cdiv(count, ROWS) * tiles,)](
        *descriptors(hidden, weight, COLUMNS),
        *descriptors(other, head, COLUMNS),
        partial,
        count,
        vocabulary,
        tiles,
        1.0 / temperature,
        K=hidden.shape[1],
        K_OTHER=other.shape[1],
        COLUMNS=COLUMNS,
        **TILES,
    )
    _reduce[(triton.cdiv(count, 64),)](partial, out[0], out[1], out[2], count, tiles, BLOCK=64, num_warps=2)
    return out[0], out[1], out[2]


def logit_gradients(
    hidden: Tensor,
    weight: Tensor,
    other: Tensor,
    head: Tensor,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    temperature: float,
    columns: slice,
    out: Tensor,
) -> Tensor:
    """Gradient of the student's logits of `columns` (from a multiple of the tile on), bf16 in `out`.

    `rows` are the KL, both log-sum-exps and the gradient of the KL, each [T] fp32.
    """
    count, size = len(hidden), columns.stop - columns.start
    if not count:
        return out[:, :size]
    tiles = triton.cdiv(size, COLUMNS)
    _logit_gradients[(triton.cdiv(count, ROWS) * tiles,)](
        *descriptors(hidden, weight, COLUMNS),
        *descriptors(other, head, COLUMNS),
        *rows,
        out,
        count,
        columns.stop,
        tiles,
        columns.start,
        out.stride(0),
        1.0 / temperature,
        K=hidden.shape[1],
        K_OTHER=other.shape[1],
        COLUMNS=COLUMNS,
        **TILES,
    )
    return out[:, :size]
