"""Logit tiles that never leave the chip: per tile a maximum, a sum, sum of p * logit and the label's logit.

Operands come through the tensor memory accelerator; tiles and their order are fixed, so a row's bits do not
depend on how many rows there are.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from model.ops.tile import LN2, LOG2E, MASKED, operand, round_bf16

ROWS, COLUMNS, DEPTH, GROUP = 128, 256, 64, 8


@triton.jit
def logit_tile(
    hidden,
    weight,
    count,
    tiles,
    first_column,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One [ROWS, COLUMNS] tile of hidden @ weight.T; GROUP row tiles in turn share a column tile."""
    program = tl.program_id(0)
    row_tiles = (count + ROWS - 1) // ROWS
    group = program // (GROUP * tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    row_tile = group * GROUP + program % (GROUP * tiles) % size
    column_tile = program % (GROUP * tiles) // size
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(0, K, DEPTH):
        x = operand(hidden.load([row_tile * ROWS, k]))
        w = operand(weight.load([first_column + column_tile * COLUMNS, k]))
        acc = tl.dot(x, tl.trans(w), acc)
    return acc, row_tile, column_tile


@triton.jit
def _partials(
    hidden,
    weight,
    labels,
    tops,
    sums,
    products,
    label_logits,
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
    tl.store(products + at, tl.sum(tl.where((c < vocabulary)[None, :], e * z, 0.0), 1), mask=inside)
    hit = (label >= column_tile * COLUMNS) & (label < column_tile * COLUMNS + COLUMNS)
    chosen = tl.sum(tl.where(c[None, :] == label[:, None], z, 0.0), 1)
    tl.store(label_logits + r, chosen, mask=inside & hit)


@triton.jit
def _reduce(tops, sums, products, label_logits, lse, logprob, entropy, count, tiles, BLOCK: tl.constexpr):
    """Merge the column tiles of each row in order."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < count
    top = tl.full((BLOCK,), MASKED, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for v in tl.range(0, tiles):
        at = v * count + r
        m = tl.load(tops + at, mask=inside, other=0.0)
        raised = tl.maximum(top, m)
        old = tl.exp2((top - raised) * LOG2E)
        new = tl.exp2((m - raised) * LOG2E)
        total = total * old + tl.load(sums + at, mask=inside, other=1.0) * new
        product = product * old + tl.load(products + at, mask=inside, other=0.0) * new
        top = raised
    value = top + tl.log2(total) * LN2
    tl.store(lse + r, value, mask=inside)
    tl.store(logprob + r, tl.load(label_logits + r, mask=inside, other=0.0) - value, mask=inside)
    tl.store(entropy + r, value - product / total, mask=inside)


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


_TILES = {"ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": DEPTH, "GROUP": GROUP, "num_warps": 8, "num_stages": 4}


def _descriptors(hidden: Tensor, weight: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    width = hidden.shape[1]
    if width % DEPTH:
        raise ValueError(f"the hidden width must be a multiple of {DEPTH}, got {width}")
    return (
        TensorDescriptor.from_tensor(hidden, [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(weight, [COLUMNS, DEPTH]),
    )


def forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and log-sum-exp, each [T] fp32."""
    count, width = hidden.shape
    vocabulary = len(weight)
    tiles = triton.cdiv(vocabulary, COLUMNS)
    partial = torch.empty((3, tiles, count), dtype=torch.float32, device=hidden.device)
    out = torch.empty((4, count), dtype=torch.float32, device=hidden.device)
    x, w = _descriptors(hidden, weight)
    _partials[(triton.cdiv(count, ROWS) * tiles,)](
        x,
        w,
        labels,
        partial[0],
        partial[1],
        partial[2],
        out[3],
        count,
        vocabulary,
        tiles,
        1.0 / temperature,
        K=width,
        **_TILES,
    )
    _reduce[(triton.cdiv(count, 64),)](
        partial[0],
        partial[1],
        partial[2],
        out[3],
        out[2],
        out[0],
        out[1],
        count,
        tiles,
        BLOCK=64,
        num_warps=2,
    )
    return out[0], out[1], out[2]


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
    x, w = _descriptors(hidden, weight)
    _logit_gradients[(triton.cdiv(count, ROWS) * tiles,)](
        x,
        w,
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
        **_TILES,
    )
    return out[:, :size]
