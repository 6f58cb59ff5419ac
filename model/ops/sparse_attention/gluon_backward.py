"""dQ of sparse attention from probabilities that the forward kept, with specialised warps as in the forward.

Without the scores one product of three is left out, and their queries' place in shared memory holds a second
tile of keys.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from model.ops.sparse_attention.gluon import (
    HEADS,
    TILE,
    WIDTH,
    allocate,
    gather,
    scores,
    used_pairs,
    visited,
    weigh,
)
from model.ops.sparse_attention.triton import Kept, KeyRows
from model.ops.tile import LOG2E


@gluon.jit
def _head_products(out, grad_out, H: gl.constexpr, D: gl.constexpr):
    """Each head's product [H] of output and gradient."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    h = gl.expand_dims(gl.arange(0, H, gl.SliceLayout(1, LAYOUT)), 1)
    d = gl.expand_dims(gl.arange(0, 256, gl.SliceLayout(0, LAYOUT)), 0)
    total = gl.zeros((H,), gl.float32, gl.SliceLayout(1, LAYOUT))
    for c in gl.static_range(D // 256):
        at = c * 256 + h * D + d
        total += gl.sum(gl.load(out + at).to(gl.float32) * gl.load(grad_out + at).to(gl.float32), 1)
    return total


@gluon.jit
def _compute(
    shared,
    counts,
    out,
    grad_out,
    lse,
    lost,
    kept,
    tops,
    grad_query,
    weights,
    grad_scores,
    delta,
    token,
    softmax_scale,
    MAIN: gl.constexpr,
    COLUMNS: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    TOPS: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    PAIRS: gl.constexpr = COLUMNS // (2 * BLOCK)
    scale = softmax_scale * LOG2E
    used = used_pairs(counts, token, MAIN, BLOCK)
    h = gl.arange(0, H, ROW)
    log_total = gl.load(lse + token * H + h) * LOG2E
    dot_out = gl.convert_layout(_head_products(out + token * H * D, grad_out + token * H * D, H, D), ROW)
    dot_out += gl.load(lost + token * H + h)
    gl.store(delta + token * H + h, dot_out)
    column = gl.arange(0, 2 * BLOCK, gl.SliceLayout(0, SCORES))
    place = gl.expand_dims(h * COLUMNS, 1) + gl.expand_dims(column, 0)
    acc = gl.zeros((H, D), gl.float32, VALUES)
    for n in range(used + PAIRS - MAIN // (2 * BLOCK)):
        pair = visited(n, used, MAIN, BLOCK)
        at = token * H * COLUMNS + 2 * pair * BLOCK
        p = gl.load(kept + at + place)
        top = gl.load(tops + (token * PAIRS + pair) * (TOPS * H) + h)
        if TOPS == 2:
            second = gl.load(tops + (token * PAIRS + pair) * (TOPS * H) + H + h)
        dp = scores(shared, n & 1, SCORES, H, BLOCK)
        factor = gl.expand_dims(gl.exp2(top * scale - log_total), 1)
        if TOPS == 2:
            late = gl.expand_dims(gl.exp2(second * scale - log_total), 1)
            factor = gl.where(gl.expand_dims(column < BLOCK, 0), factor, late)
        p = p.to(gl.float32) * factor
        ds = (p * (dp - gl.expand_dims(dot_out, 1)) * softmax_scale).to(gl.bfloat16)
        gl.store(weights + at + place, p.to(gl.bfloat16))
        gl.store(grad_scores + at + place, ds)
        acc = weigh(shared, ds, acc, BLOCK)
    row = gl.expand_dims(gl.arange(0, H, gl.SliceLayout(1, VALUES)), 1)
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, VALUES)), 0)
    gl.store(grad_query + token * H * D + row * D + d, acc.to(gl.bfloat16))


@gluon.jit
def _kept_query_gradient(
    table,
    rows,
    counts,
    out,
    grad_out,
    lse,
    lost,
    kept,
    tops,
    grad_query,
    weights,
    grad_scores,
    delta,
    softmax_scale,
    MAIN: gl.constexpr,
    COLUMNS: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    TOPS: gl.constexpr,
):
    """As `model.ops.sparse_attention.backward._query_gradient`; TOPS maxima a pair of tiles."""
    token = gl.program_id(0).to(gl.int64)
    shared = allocate(grad_out + token * H * D, H, D, BLOCK)
    gl.warp_specialize(
        [
            (gather, (shared, table, rows, counts, token, MAIN, COLUMNS, D, BLOCK)),
            (_compute, (
                shared, counts, out, grad_out, lse, lost, kept, tops, grad_query, weights, grad_scores, delta,
                token, softmax_scale, MAIN, COLUMNS, H, D, BLOCK, TOPS,
            )),
        ],
        [8],
        [232],
    )  # fmt: skip


def query_gradient(
    table: Tensor,
    keys: KeyRows,
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    lost: Tensor,
    kept: Kept,
    grad_query: Tensor,
    weights: Tensor,
    grad_scores: Tensor,
    delta: Tensor,
    *,
    scale: float,
) -> None:
    """Write dQ [T, H, D], P and dS [T, H, columns], and delta [T, H]; see `backward.backward`."""
    assert table.numel() < 2**31, f"row offsets are 32 bits: {len(table)} rows are too many for one call"
    _kept_query_gradient[(len(out),)](
        table,
        keys.rows,
        keys.counts,
        out,
        grad_out,
        lse,
        lost,
        kept.weights,
        kept.tops,
        grad_query,
        weights,
        grad_scores,
        delta,
        scale,
        MAIN=keys.main,
        COLUMNS=keys.rows.shape[1],
        H=HEADS,
        D=WIDTH,
        BLOCK=TILE,
        TOPS=2 * TILE * kept.tops.shape[1] // keys.rows.shape[1],
        num_warps=4,
    )
