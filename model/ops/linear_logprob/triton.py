"""Logit tiles that never leave the chip: a tile's maximum, sum, sum of p * logit, and the label's logit."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.logit_tiles import ROWS, TILES, descriptors, logit_tile, raised
from model.ops.tile import LN2, LOG2E, MASKED, round_bf16

COLUMNS = 256


@triton.jit
def _partials(
    hidden,
    weight,
    labels,
    tops,
    sums,
    products,
    label_logits,
    firsts,
    count,
    vocabulary,
    tiles,
    inverse_temperature,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    acc, row_tile, column_tile = logit_tile(hidden, weight, count, tiles, 0, K, ROWS, COLUMNS, DEPTH, GROUP)
    r = row_tile * ROWS + tl.arange(0, ROWS)
    c = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = r < count
    label = tl.load(labels + r, mask=inside, other=-1)
    z = acc * inverse_temperature
    z = tl.where((c < vocabulary)[None, :], z, MASKED)
    top = tl.max(z, 1)
    e = tl.exp2((z - top[:, None]) * LOG2E)
    at = column_tile * count + r
    tl.store(tops + at, top, mask=inside)
    tl.store(sums + at, tl.sum(e, 1), mask=inside)
    tl.store(products + at, tl.sum(e * z, 1), mask=inside)
    hit = (label >= column_tile * COLUMNS) & (label < column_tile * COLUMNS + COLUMNS)
    chosen = tl.sum(tl.where(c[None, :] == label[:, None], z, 0.0), 1)
    tl.store(label_logits + r, chosen, mask=inside & hit)
    # A branch that few tiles take, and that leaves the registers of all before it alone.
    likeliest = inside & hit & (chosen == top)
    if tl.max(likeliest.to(tl.int32), 0) > 0:
        tl.store(firsts + r, column_tile * COLUMNS + tl.argmax(z, 1), mask=likeliest)


@triton.jit
def _reduce(
    labels,
    tops,
    sums,
    products,
    label_logits,
    firsts,
    lse,
    logprob,
    entropy,
    correct,
    count,
    tiles,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merge the column tiles of each row in order.

    The label is the likeliest word when it is the first of the largest of its tile (`firsts`, which holds
    anything where it is not the largest), larger than all of the tiles before and no smaller than the rest.
    """
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < count
    top = tl.full((BLOCK,), MASKED, tl.float32)
    label = tl.load(labels + r, mask=inside, other=0)
    before = tl.full((BLOCK,), MASKED, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for v in tl.range(0, tiles):
        at = v * count + r
        m = tl.load(tops + at, mask=inside, other=0.0)
        before = tl.where(v < label // COLUMNS, tl.maximum(before, m), before)
        top, old, new = raised(top, m)
        total = total * old + tl.load(sums + at, mask=inside, other=1.0) * new
        product = product * old + tl.load(products + at, mask=inside, other=0.0) * new
    value = top + tl.log2(total) * LN2
    tl.store(lse + r, value, mask=inside)
    chosen = tl.load(label_logits + r, mask=inside, other=0.0)
    tl.store(logprob + r, chosen - value, mask=inside)
    tl.store(entropy + r, value - product / total, mask=inside)
    first = tl.load(firsts + r, mask=inside, other=0) == label
    tl.store(correct + r, first & (chosen == top) & (chosen > before), mask=inside)


@triton.jit
def _logit_gradients(
    hidden,
    weight,
    labels,
    lse,
    entropy,
    grad_logprob,
    grad_entropy,
    grad,
    count,
    vocabulary,
    tiles,
    first_column,
    stride,
    inverse_temperature,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """d/dlogit = (g (1[label] - p) - h p (log p + entropy)) / temperature; g, h: gradients of the outputs."""
    acc, row_tile, column_tile = logit_tile(
        hidden, weight, count, tiles, first_column, K, ROWS, COLUMNS, DEPTH, GROUP
    )
    r = row_tile * ROWS + tl.arange(0, ROWS)
    local = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    c = first_column + local
    inside = r < count
    label = tl.load(labels + r, mask=inside, other=-1)
    g = tl.load(grad_logprob + r, mask=inside, other=0.0) * inverse_temperature
    h = tl.load(grad_entropy + r, mask=inside, other=0.0) * inverse_temperature
    total = tl.load(lse + r, mask=inside, other=0.0)
    spread = tl.load(entropy + r, mask=inside, other=0.0)
    logp = acc * inverse_temperature - total[:, None]
    p = tl.exp2(logp * LOG2E)
    onehot = tl.where(c[None, :] == label[:, None], 1.0, 0.0)
    dz = (onehot - p) * g[:, None] - p * (logp + spread[:, None]) * h[:, None]
    tl.store(
        grad + r.to(tl.int64)[:, None] * stride + local[None, :],
        round_bf16(dz).to(grad.dtype.element_ty),
        mask=inside[:, None] & (c < vocabulary)[None, :],
    )


def forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and log-sum-exp, [T] fp32; whether the label is likeliest, [T] bool."""
    count, width = hidden.shape
    tiles = triton.cdiv(len(weight), COLUMNS)
    out = torch.empty((4, count), dtype=torch.float32, device=hidden.device)
    correct = torch.empty(count, dtype=torch.bool, device=hidden.device)
    if not count:
        return out[0], out[1], out[2], correct
    partial = torch.empty((3, tiles, count), dtype=torch.float32, device=hidden.device)
    firsts = torch.empty(count, dtype=torch.int32, device=hidden.device)
    _partials[(triton.cdiv(count, ROWS) * tiles,)](
        *descriptors(hidden, weight, COLUMNS),
        labels,
        *partial,
        out[3],
        firsts,
        count,
        len(weight),
        tiles,
        1.0 / temperature,
        K=width,
        COLUMNS=COLUMNS,
        **TILES,
    )
    _reduce[(triton.cdiv(count, 64),)](
        labels,
        *partial,
        out[3],
        firsts,
        out[2],
        out[0],
        out[1],
        correct,
        count,
        tiles,
        BLOCK=64,
        COLUMNS=COLUMNS,
        num_warps=2,
    )
    return out[0], out[1], out[2], correct


def logit_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    *,
    temperature: float,
    columns: slice,
    out: Tensor,
) -> Tensor:
    """Gradient of the logits of `columns` (from a multiple of the tile on), [T, columns] bf16 in `out`."""
    count, width = hidden.shape
    size = columns.stop - columns.start
    tiles = triton.cdiv(size, COLUMNS)
    if not count:
        return out[:, :size]
    _logit_gradients[(triton.cdiv(count, ROWS) * tiles,)](
        *descriptors(hidden, weight, COLUMNS),
        labels,
        lse,
        entropy,
        grad_logprob,
        grad_entropy,
        out,
        count,
        columns.stop,
        tiles,
        columns.start,
        out.stride(0),
        1.0 / temperature,
        K=width,
        COLUMNS=COLUMNS,
        **TILES,
    )
    return out[:, :size]
