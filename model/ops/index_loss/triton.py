"""One program a token: what the teacher weighs, then the student's loss and the slope of every score.

Two kernels, because the teacher's tiles leave room for one program on a processor and the student's for five.
Keys are on the rows of the products, as in the indexer's scores, so that sums over heads stay inside a
thread. The gradient of the index keys is stored as bf16 rows and summed by entry in list order, as the
attention sums that of its entries: no atomics.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.index_loss.reference import SMALLEST_MASS, SMALLEST_SUM
from model.ops.sparse_attention.backward import gather_rows
from model.ops.sparse_attention.inverse import InverseIndex
from model.ops.tile import LN2, LOG2E, MASKED, operand, round_bf16

_SUM, _MASS = tl.constexpr(SMALLEST_SUM), tl.constexpr(SMALLEST_MASS)


@triton.jit
def _rows_of(table, i, WIDTH: tl.constexpr):
    """Rows `i` of a table [E, WIDTH], as the tensor cores take them; some row for -1."""
    c = tl.arange(0, WIDTH)
    return operand(tl.load(table + tl.maximum(i, 0).to(tl.int64)[:, None] * WIDTH + c[None, :]))


@triton.jit
def _student(heads, weights, token, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, C: tl.constexpr):
    """A token's index heads [PADDED_GROUPS, C], their places, and the weights of the heads."""
    g = tl.arange(0, PADDED_GROUPS)
    c = tl.arange(0, C)
    tile = token * GROUPS * C + g[:, None] * C + c[None, :]
    q = operand(tl.load(heads + tile, mask=(g < GROUPS)[:, None], other=0.0))
    return q, tile, tl.load(weights + token * GROUPS + g, mask=g < GROUPS, other=0.0)


@triton.jit
def _teach(
    query,
    entries,
    lse,
    indices,
    mass,
    softmax_scale,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attention on each selected entry, summed over heads."""
    token = tl.program_id(0).to(tl.int64)
    query += token * HEADS * D
    indices += token * KEYS
    mass += token * KEYS
    d = tl.arange(0, D)
    for first in tl.static_range(0, HEADS, BLOCK_H):
        if first > 0:
            tl.debug_barrier()
        h = first + tl.arange(0, BLOCK_H)
        q = operand(tl.load(query + h[:, None] * D + d[None, :]))
        shift = tl.load(lse + token * HEADS + h) * LOG2E
        for n in tl.range(0, KEYS, BLOCK):
            column = n + tl.arange(0, BLOCK)
            i = tl.load(indices + column, mask=column < KEYS, other=-1)
            s = tl.dot(_rows_of(entries, i, D), tl.trans(q)) * (softmax_scale * LOG2E)
            total = tl.sum(tl.exp2(s - shift[None, :]), 1)
            if first > 0:
                total += tl.load(mass + column, mask=column < KEYS, other=0.0)
            tl.store(mass + column, tl.where(i >= 0, total, 0.0), mask=column < KEYS)


@triton.jit
def _losses(
    heads,
    weights,
    keys,
    indices,
    mass,
    slopes,
    losses,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    indices += token * KEYS
    mass += token * KEYS
    slopes += token * KEYS
    q, _, w = _student(heads, weights, token, GROUPS, PADDED_GROUPS, C)
    for n in tl.range(0, KEYS, BLOCK):
        column = n + tl.arange(0, BLOCK)
        i = tl.load(indices + column, mask=column < KEYS, other=-1)
        dots = tl.dot(_rows_of(keys, i, C), tl.trans(q))
        tl.store(slopes + column, tl.sum(tl.maximum(dots, 0.0) * w[None, :], 1), mask=column < KEYS)
    tl.debug_barrier()
    column = tl.arange(0, PADDED)
    inside = column < KEYS
    chosen = tl.load(indices + column, mask=inside, other=-1) >= 0
    m = tl.load(mass + column, mask=inside, other=0.0)
    m = m / tl.maximum(tl.sum(m, 0), _SUM)
    s = tl.where(chosen, tl.load(slopes + column, mask=inside, other=0.0), MASKED)
    s -= tl.max(s, 0)
    e = tl.where(chosen, tl.exp2(s * LOG2E), 0.0)
    total = tl.maximum(tl.sum(e, 0), _SUM)
    gap = tl.log2(tl.maximum(m, _MASS)) * LN2 - (s - tl.log2(total) * LN2)
    tl.store(losses + token, tl.sum(tl.where(chosen, m * gap, 0.0), 0))
    tl.debug_barrier()
    tl.store(slopes + column, e / total * tl.sum(m, 0) - m, mask=inside)


@triton.jit
def _gradients(
    heads,
    weights,
    keys,
    indices,
    slopes,
    grad,
    grad_heads,
    grad_weights,
    rows,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, PADDED_GROUPS)
    c = tl.arange(0, C)
    q, tile, w = _student(heads, weights, token, GROUPS, PADDED_GROUPS, C)
    loss = tl.load(grad + token)
    acc = tl.zeros((PADDED_GROUPS, C), tl.float32)
    total = tl.zeros((PADDED_GROUPS,), tl.float32)
    for n in tl.range(0, KEYS, BLOCK):
        column = n + tl.arange(0, BLOCK)
        at = token * KEYS + column
        i = tl.load(indices + at, mask=column < KEYS, other=-1)
        slope = tl.load(slopes + at, mask=column < KEYS, other=0.0) * loss
        k = _rows_of(keys, i, C)
        dots = tl.dot(k, tl.trans(q))
        total += tl.sum(tl.maximum(dots, 0.0) * slope[:, None], 0)
        through = round_bf16(tl.where(dots > 0, slope[:, None] * w[None, :], 0.0))
        acc = tl.dot(tl.trans(through), k, acc)
        row = round_bf16(tl.dot(through, q)).to(rows.dtype.element_ty)
        tl.store(rows + at[:, None] * C + c[None, :], row, mask=(column < KEYS)[:, None])
    tl.store(grad_heads + tile, round_bf16(acc).to(grad_heads.dtype.element_ty), mask=(g < GROUPS)[:, None])
    tl.store(grad_weights + token * GROUPS + g, total, mask=g < GROUPS)


def _padded(groups: int) -> int:
    """Index heads of a tile: a product sums over no fewer than 16."""
    return max(16, triton.next_power_of_2(groups))


def forward(
    heads: Tensor,
    weights: Tensor,
    keys: Tensor,
    query: Tensor,
    entries: Tensor,
    lse: Tensor,
    indices: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Losses [T] and their slopes in the scores of the selected entries [T, K], both fp32."""
    count, chosen = indices.shape
    losses = torch.empty(count, dtype=torch.float32, device=heads.device)
    mass, slopes = torch.empty((2, count, chosen), dtype=torch.float32, device=heads.device)
    if not count or not chosen:
        return losses.zero_(), slopes
    heads_count, width = query.shape[1:]
    _teach[(count,)](
        query,
        entries,
        lse,
        indices,
        mass,
        scale,
        HEADS=heads_count,
        BLOCK_H=min(64, heads_count),
        D=width,
        KEYS=chosen,
        BLOCK=64 if width >= 64 else 16,
        num_warps=4,
        num_stages=2,
    )
    _losses[(count,)](
        heads,
        weights,
        keys,
        indices,
        mass,
        slopes,
        losses,
        GROUPS=heads.shape[1],
        PADDED_GROUPS=_padded(heads.shape[1]),
        C=heads.shape[2],
        KEYS=chosen,
        PADDED=triton.next_power_of_2(chosen),
        BLOCK=64 if chosen >= 64 else 16,
        num_warps=4,
        num_stages=2,
    )
    return losses, slopes


def backward(
    heads: Tensor,
    weights: Tensor,
    keys: Tensor,
    indices: Tensor,
    slopes: Tensor,
    grad: Tensor,
    inverse: InverseIndex,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of heads, of weights (fp32) and of index keys (fp32)."""
    (count, groups, width), chosen = heads.shape, indices.shape[1]
    grad_heads = torch.zeros_like(heads)
    grad_weights = torch.zeros((count, groups), dtype=torch.float32, device=heads.device)
    grad_keys = torch.zeros(keys.shape, dtype=torch.float32, device=heads.device)
    if not count or not chosen:
        return grad_heads, grad_weights, grad_keys
    rows = torch.empty((min(inverse.chunk, count), chosen, width), dtype=heads.dtype, device=heads.device)
    for c, start in enumerate(range(0, count, inverse.chunk)):
        part = slice(start, min(start + inverse.chunk, count))
        _gradients[(part.stop - start,)](
            heads[part],
            weights[part],
            keys,
            indices[part],
            slopes[part],
            grad[part],
            grad_heads[part],
            grad_weights[part],
            rows,
            GROUPS=groups,
            PADDED_GROUPS=_padded(groups),
            C=width,
            KEYS=chosen,
            BLOCK=64 if chosen >= 64 else 16,
            num_warps=4,
            num_stages=2,
        )
        gather_rows[(len(keys),)](
            rows,
            inverse.pointers[c],
            inverse.slots[c],
            grad_keys,
            KEYS=chosen,
            MAIN=chosen,
            D=width,
            BLOCK=32,
            num_warps=4,
        )
    return grad_heads, grad_weights, grad_keys
