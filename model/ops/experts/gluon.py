"""Products of many rows with the matrix of their expert, by specialised warps on every multiprocessor.

One warpgroup loads, up to four slots ahead and on into the next tile; two multiply, 64 rows each. Gathering
costs little here, because it is the loading warps that do it. Sums run over K in the order of the plain
kernels, so that the bits are theirs.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from model.ops.experts.activation import activate, weights_of
from model.ops.experts.plan import TILE_ROWS, Plan, shape_of
from model.ops.hopper import barrier, copy, load_tile, slot_barriers
from model.ops.side import processors

COLUMNS, DEPTH, SLOTS, GROUP = 256, 64, 4, 4


@aggregate
class Shared:
    """Slots of rows and of a matrix, and the barriers of each slot."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, a, b, ready, free):
        self.a, self.b, self.ready, self.free = a, b, ready, free


@aggregate
class Task:
    """What a program computes: the tables that say which rows, and pointers of rows, weights and result."""

    x: gl.tensor
    tiles: gl.tensor
    ends: gl.tensor
    tokens: gl.tensor
    place: gl.tensor
    weights: gl.tensor
    out: gl.tensor
    limit: gl.tensor
    row_tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(self, x, tiles, ends, tokens, place, weights, out, limit, row_tiles):
        self.x, self.tiles, self.ends, self.tokens, self.place = x, tiles, ends, tokens, place
        self.weights, self.out, self.limit, self.row_tiles = weights, out, limit, row_tiles


@gluon.jit
def _where(task, t, columns, GROUP: gl.constexpr):
    """Expert, first row and column tile of tile `t`; GROUP row tiles in turn share columns."""
    group = t // (GROUP * columns)
    size = gl.minimum(task.row_tiles - group * GROUP, GROUP)
    tile = group * GROUP + t % (GROUP * columns) % size
    column = t % (GROUP * columns) // size
    return gl.load(task.tiles + 2 * tile), gl.load(task.tiles + 2 * tile + 1), column


@gluon.jit
def _multiply(
    shared, task, who: gl.constexpr, D, N, K: gl.constexpr, KS: gl.constexpr,
    OF_TOKENS: gl.constexpr, PAIR: gl.constexpr, BACK: gl.constexpr, SLOTS: gl.constexpr,
    COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    WIDE: gl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    columns = (N + WIDE - 1) // WIDE
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [4, 1], [1, 0])
    it = 0
    for t in range(gl.program_id(0), task.row_tiles * columns, gl.num_programs(0)):
        g, first, column = _where(task, t, columns, GROUP)
        end = gl.load(task.ends + g)
        acc = gl.zeros((64, COLUMNS), gl.float32, ACC)
        for k in range(D // DEPTH):
            slot = it % SLOTS
            mbarrier.wait(shared.ready.index(slot), (it // SLOTS) & 1)
            if OF_TOKENS:
                fence_async_shared()
            a = shared.a.index(slot).slice(who * 64, 64, 0)
            b = shared.b.index(slot)
            if not BACK:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            barrier()
            mbarrier.arrive(shared.free.index((it + SLOTS - 1) % SLOTS), pred=k > 0)
            it += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(shared.free.index((it + SLOTS - 1) % SLOTS))
        if PAIR:
            gate, up = gl.split(gl.permute(gl.reshape(acc, (64, 2, WIDE)), (0, 2, 1)))
            ROW: gl.constexpr = gl.SliceLayout(1, gate.type.layout)
            row = first + who * 64 + gl.arange(0, 64, ROW)
            token = gl.load(task.tokens + row, mask=row < end, other=0)
            scale = weights_of(row, token, row < end, task.place, task.weights, K, KS)
            result = (activate(gate, up, task.limit) * gl.expand_dims(scale, 1)).to(gl.bfloat16)
        else:
            result = acc.to(gl.bfloat16)
        r = first + who * 64 + gl.arange(0, 64, gl.SliceLayout(1, OUT))
        c = column * WIDE + gl.arange(0, WIDE, gl.SliceLayout(0, OUT))
        target = task.out + gl.expand_dims(r.to(gl.int64) * N, 1) + gl.expand_dims(c, 0)
        keep = gl.expand_dims(r < end, 1) & gl.expand_dims(c < N, 0)
        gl.store(target, gl.convert_layout(result, OUT), mask=keep)


@gluon.jit
def _feed(
    shared, task, block, matrix, D, N, OF_TOKENS: gl.constexpr,
    PAIR: gl.constexpr, BACK: gl.constexpr, SLOTS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    WIDE: gl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    columns = (N + WIDE - 1) // WIDE
    BYTES: gl.constexpr = 2 * DEPTH * (COLUMNS if OF_TOKENS else COLUMNS + ROWS)
    it = 0
    for t in range(gl.program_id(0), task.row_tiles * columns, gl.num_programs(0)):
        g, first, column = _where(task, t, columns, GROUP)
        n = column * WIDE
        if OF_TOKENS:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            row = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            row = gl.where(row < gl.load(task.ends + g), row, first)
            token = gl.load(task.tokens + row)
            channel = gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT))
            source = task.x + gl.expand_dims(token.to(gl.int64) * D, 1) + gl.expand_dims(channel, 0)
        for k in range(D // DEPTH):
            slot = it % SLOTS
            d = k * DEPTH
            mbarrier.wait(shared.free.index(slot), ((it // SLOTS) & 1) ^ 1)
            ready = shared.ready.index(slot)
            mbarrier.expect(ready, BYTES)
            if BACK:
                load_tile(matrix, [g * D + d, n], ready, shared.b.index(slot))
            elif PAIR:
                load_tile(matrix, [g * 2 * N + n, d], ready, shared.b.index(slot).slice(0, WIDE, 0))
                load_tile(matrix, [g * 2 * N + N + n, d], ready, shared.b.index(slot).slice(WIDE, WIDE, 0))
            else:
                load_tile(matrix, [g * N + n, d], ready, shared.b.index(slot))
            if OF_TOKENS:
                copy(shared.a.index(slot), source + d)
                async_copy.mbarrier_arrive(ready, increment_count=False)
            else:
                load_tile(block, [first, d], ready, shared.a.index(slot))
            it += 1


@gluon.jit(do_not_specialize=["bound"])
def _specialised(
    x, block, matrix, tiles, ends, tokens, place, weights, out, limit, bound, D, N, K: gl.constexpr,
    KS: gl.constexpr, OF_TOKENS: gl.constexpr, PAIR: gl.constexpr, BACK: gl.constexpr, SLOTS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, DEPTH], LAYOUT)
    b = gl.allocate_shared_memory(
        gl.bfloat16, [SLOTS, DEPTH, COLUMNS] if BACK else [SLOTS, COLUMNS, DEPTH], LAYOUT
    )
    ready, free = slot_barriers(SLOTS, 129 if OF_TOKENS else 1, 2)
    fence_async_shared()
    barrier()
    shared = Shared(a, b, ready, free)
    task = Task(x, tiles, ends, tokens, place, weights, out, limit, gl.load(tiles + 2 * bound))
    gl.warp_specialize(
        [
            (
                _multiply,
                (shared, task, 0, D, N, K, KS, OF_TOKENS, PAIR, BACK, SLOTS, COLUMNS, DEPTH, GROUP),
            ),
            (
                _multiply,
                (shared, task, 1, D, N, K, KS, OF_TOKENS, PAIR, BACK, SLOTS, COLUMNS, DEPTH, GROUP),
            ),
            (
                _feed,
                (
                    shared, task, block, matrix, D, N, OF_TOKENS, PAIR, BACK, SLOTS, COLUMNS, DEPTH, GROUP,
                    ROWS,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, 72 if OF_TOKENS else 40],
    )  # fmt: skip


def specialised(
    x: Tensor,
    weight: Tensor,
    plan: Plan,
    *,
    of_tokens: bool = False,
    back: bool = False,
    weights: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Rows [n, .] times their expert's matrix of `weight` [G, N, K]: [n, N], or [n, K] if `back`.

    Args:
        x: rows, or with `of_tokens` tokens [T, .]; the sum is over a multiple of 64.
        weight: matrices, the last dimension contiguous.
        plan: which rows are whose.
        of_tokens: gather the rows.
        back: multiply by the matrix itself, not by its transpose.
        weights: [T, k] of the routed experts: activate products as gates and ups, and weigh: [n, N / 2].
        limit: of the activation.
    """
    pair = weights is not None
    depth, target, tile = shape_of(weight, back, pair, COLUMNS)
    out = torch.empty((len(plan.tokens), target), dtype=x.dtype, device=x.device)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    block = TensorDescriptor.from_tensor(x, [TILE_ROWS, DEPTH], layout)
    matrix = weight.view(-1, weight.shape[2])
    _specialised[(processors(x.device),)](
        x, block, TensorDescriptor.from_tensor(matrix, [DEPTH, tile] if back else [tile, DEPTH], layout),
        plan.tiles, plan.ends, plan.tokens, plan.place, x if weights is None else weights, out, limit,
        len(plan.tiles) - 1, depth, target, K=0 if weights is None else weights.shape[1],
        KS=plan.place.shape[1] if pair else 0, OF_TOKENS=of_tokens, PAIR=pair, BACK=back, SLOTS=SLOTS,
        ROWS=TILE_ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, GROUP=GROUP, REGISTERS=216 if of_tokens else 232,
        num_warps=4,
    )  # fmt: skip
    return out
