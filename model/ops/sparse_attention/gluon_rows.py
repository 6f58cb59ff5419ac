"""Gradient rows of selected entries from P and dS, for 64 heads of 512: tiles come and go by the copy engine.

Two warpgroups multiply, each for half of the channels; while they do, the next tiles of P and dS arrive and
the last rows leave.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from model.ops.hopper import barrier, load_tile, store_tile
from model.ops.sparse_attention.gluon import HEADS, TILE, WIDTH


@gluon.jit
def _load_weights(weights, grad_scores, p, ds, ready, row, n, slot, H: gl.constexpr, BLOCK: gl.constexpr):
    """Begin to load P and dS of tile `n` into a slot."""
    column = n * BLOCK
    arrived = ready.index(slot)
    p, ds = p.index(slot), ds.index(slot)
    mbarrier.expect(arrived, 2 * H * BLOCK * 2)
    load_tile(weights, [row, column], arrived, p)
    load_tile(grad_scores, [row, column], arrived, ds)


@gluon.jit
def _entry_rows(
    query,
    grad_out,
    weights,
    grad_scores,
    counts,
    rows,
    MAIN: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """As `model.ops.sparse_attention.backward._entry_rows`."""
    token = gl.program_id(0)
    tiles = (gl.load(counts + token * 2) + BLOCK - 1) // BLOCK
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(gl.bfloat16, [H, D], query.layout)
    do = gl.allocate_shared_memory(gl.bfloat16, [H, D], query.layout)
    p = gl.allocate_shared_memory(gl.bfloat16, [2, H, BLOCK], weights.layout)
    ds = gl.allocate_shared_memory(gl.bfloat16, [2, H, BLOCK], weights.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, D], rows.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    heads = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(heads, 1)
    for k in gl.static_range(2):
        mbarrier.init(ready.index(k), 1)
    fence_async_shared()
    barrier()
    if tiles > 0:
        mbarrier.expect(heads, 2 * H * D * 2)
        load_tile(query, [token * H, 0], heads, q)
        load_tile(grad_out, [token * H, 0], heads, do)
        for k in gl.static_range(2):
            if k < tiles:
                _load_weights(weights, grad_scores, p, ds, ready, token * H, k, k, H, BLOCK)
        mbarrier.wait(heads, 0)
        for n in range(tiles):
            slot = n % 2
            mbarrier.wait(ready.index(slot), (n // 2) & 1)
            acc = gl.zeros((BLOCK, D), gl.float32, VALUES)
            acc = warpgroup_mma(ds.index(slot).permute((1, 0)), q, acc, use_acc=False, is_async=True)
            acc = warpgroup_mma(p.index(slot).permute((1, 0)), do, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            # The last rows have left `out`, and all warps have read P and dS.
            tma.store_wait(0)
            barrier()
            if n + 2 < tiles:
                _load_weights(weights, grad_scores, p, ds, ready, token * H, n + 2, slot, H, BLOCK)
            out.store(acc.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            store_tile(rows, [token * MAIN + n * BLOCK, 0], out)
        tma.store_wait(0)


def entry_rows(
    query: Tensor, grad_out: Tensor, weights: Tensor, grad_scores: Tensor, counts: Tensor, rows: Tensor
) -> None:
    """Write `rows` [T, MAIN, D], the gradient of each (query, entry); where no entry is, anything."""
    _entry_rows[(len(query),)](
        _tiles(query, HEADS, WIDTH),
        _tiles(grad_out, HEADS, WIDTH),
        _tiles(weights, HEADS, TILE),
        _tiles(grad_scores, HEADS, TILE),
        counts,
        _tiles(rows, TILE, WIDTH),
        MAIN=rows.shape[1],
        H=HEADS,
        D=WIDTH,
        BLOCK=TILE,
        num_warps=8,
    )


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """[T, n, m] as tiles [rows, columns] of [T n, m]."""
    return TensorDescriptor.from_tensor(x.flatten(0, 1), [rows, columns], gl.NVMMASharedLayout(128, 16, 2))
