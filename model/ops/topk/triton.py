"""Exact top-k by group maxima: the k best columns lie in the k groups whose maxima are best.

Were a column in another group, the maxima of those k would all be better than it: larger, or as large and
further left. So k groups are chosen by their maxima, by the same means while there are many, and the columns
among theirs; what is left fits in registers, where narrowing the range of values finds the k-th largest. The
cost does not depend on the scores. Counts and prefix sums only, no atomics: the same set in the same order
every time.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.topk import FEW


@triton.jit
def _ordered(x):
    """fp32 -> uint32 in the same order; -0 equals +0; -inf and NaN become 0, below everything."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(x > float("-inf"), key, 0)


@triton.jit
def _threshold(keys, K: tl.constexpr):
    """What exactly K keys reach, or where equal keys forbid that the K-th largest; zeros do not count.

    The smallest key if there are fewer than K. A round cuts the range it lies in to a third, by one sum of
    two counts.
    """
    low = tl.min(tl.where(keys > 0, keys, 0xFFFFFFFF), 0)
    high = tl.max(keys, 0)
    reached = tl.sum((keys > 0).to(tl.int32), 0)
    while (low < high) & (reached > K):
        step = (high - low + 2) // 3
        first = low + step
        second = tl.minimum(first + step, high)
        counts = tl.sum((keys >= first).to(tl.int32) + ((keys >= second).to(tl.int32) << 16), 0)
        one = (counts & 0xFFFF) >= K
        two = (counts >> 16) >= K
        high = tl.where(two, high, tl.where(one, second, first) - 1)
        low = tl.where(two, second, tl.where(one, first, low))
        reached = tl.where(two, counts >> 16, tl.where(one, counts & 0xFFFF, reached))
    return low


@triton.jit
def _column(blocks, row, place, inside, listed, SIZE: tl.constexpr):
    """Columns that places in listed blocks stand for, negative for none."""
    block = tl.load(blocks + row * listed + place // SIZE, mask=inside, other=-1)
    return tl.where(block >= 0, block * SIZE + place % SIZE, -1)


@triton.jit
def _load(
    scores, begins, ends, blocks, row, place, inside, stride, listed, HAS_BEGINS: tl.constexpr,
    HAS_ENDS: tl.constexpr, IN_BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Scores at places of a row, -inf where there are none."""
    column = place
    if IN_BLOCKS:
        column = _column(blocks, row, place, inside, listed, SIZE)
        inside = inside & (column >= 0)
    if HAS_BEGINS:
        inside = inside & (column >= tl.load(begins + row))
    if HAS_ENDS:
        inside = inside & (column < tl.load(ends + row))
    return tl.load(scores + row * stride + column, mask=inside, other=float("-inf"))


@triton.jit(do_not_specialize=["width", "listed", "groups"])
def _group_maxima(
    scores, begins, ends, blocks, out, stride, width, listed, groups, out_stride, HAS_BEGINS: tl.constexpr,
    HAS_ENDS: tl.constexpr, IN_BLOCKS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _load(
        scores, begins, ends, blocks, row, place, place < width, stride, listed, HAS_BEGINS, HAS_ENDS,
        IN_BLOCKS, SIZE,
    )  # fmt: skip
    best = tl.max(tl.where(x > float("-inf"), x, float("-inf")), 1)
    tl.store(out + row * out_stride + g, best, mask=g < groups)


@triton.jit(do_not_specialize=["width", "listed"])
def _select(
    scores, begins, ends, blocks, chosen, out, stride, width, listed, HAS_BEGINS: tl.constexpr,
    HAS_ENDS: tl.constexpr, IN_BLOCKS: tl.constexpr, LISTED: tl.constexpr, SIZE: tl.constexpr,
    GROUPED: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    here = tl.arange(0, BLOCK)
    place = here
    inside = here < width
    if GROUPED:
        place = _column(chosen, row, here, here < K * GROUP, K, GROUP)
        inside = (place >= 0) & (place < width)
    x = _load(
        scores, begins, ends, blocks, row, place, inside, stride, listed, HAS_BEGINS, HAS_ENDS,
        IN_BLOCKS, SIZE,
    )  # fmt: skip
    keys = _ordered(x)
    threshold = _threshold(keys, K)
    taken = (keys >= threshold) & (keys > 0)
    total = tl.sum(taken.to(tl.int32), 0)
    if total > K:
        above = keys > threshold
        equal = keys == threshold
        rank = tl.cumsum(equal.to(tl.int32), 0)
        taken = above | (equal & (rank <= K - tl.sum(above.to(tl.int32), 0)))
        total = total * 0 + K
    out += row * K
    tl.store(out + tl.cumsum(taken.to(tl.int32), 0) - 1, here, mask=taken)
    tl.debug_barrier()
    p = tl.arange(0, PADDED)
    found = tl.load(out + p, mask=p < total, other=0)
    if GROUPED:
        found = _column(chosen, row, found, p < total, K, GROUP)
    if LISTED:
        found = _column(blocks, row, found, p < total, listed, SIZE)
    tl.debug_barrier()
    tl.store(out + p, tl.where(p < total, found, -1), mask=p < K)


def rows_of_scores(rows: int, width: int, device: torch.device) -> Tensor:
    """Room for scores [rows, width] fp32; rows begin at multiples of 64 bytes, for wide loads."""
    return torch.empty((rows, triton.cdiv(width, 16) * 16), dtype=torch.float32, device=device)[:, :width]


@dataclass(frozen=True)
class _Places:
    """Where columns to choose from stand: `width` places of each row of `scores`, or those of its blocks."""

    scores: Tensor
    width: int
    begins: Tensor | None = None
    ends: Tensor | None = None
    blocks: Tensor | None = None
    size: int = 1
    packed: bool = False

    def arguments(self) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, bool | int]]:
        """Tensors, numbers and flags of a kernel."""
        tensors = [self.scores if x is None else x for x in (self.begins, self.ends, self.blocks)]
        flags = {"HAS_BEGINS": self.begins is not None, "HAS_ENDS": self.ends is not None}
        flags["IN_BLOCKS"] = self.blocks is not None and not self.packed
        listed = 0 if self.blocks is None else self.blocks.shape[1]
        return (
            (self.scores, *tensors),
            (self.scores.stride(0), self.width, listed),
            {**flags, "SIZE": self.size},
        )


@dataclass(frozen=True)
class Tuning:
    """Scores that one program reads at most, maxima among which to choose, and warps (half for 2048)."""

    most: int = 8192
    maxima: int = 4096
    warps: int = 8


# A row waits for its sums over all warps, many rows for each other: with fewer warps more of them run.
FEW_ROWS, MANY_ROWS = Tuning(warps=8), Tuning(warps=4)


def topk(
    scores: Tensor,
    k: int,
    *,
    begins: Tensor | None = None,
    ends: Tensor | None = None,
    blocks: Tensor | None = None,
    block_size: int = 8,
    packed: bool = False,
    tuning: Tuning | None = None,
) -> Tensor:
    """See `model.ops.topk.topk`; the result does not depend on `tuning` (for tests and benchmarks)."""
    assert scores.stride(1) == 1, "scores must be contiguous along the row"
    width = scores.shape[1]
    if blocks is not None:
        blocks, width = blocks.contiguous(), blocks.shape[1] * block_size
    given = _Places(scores, width, begins, ends, blocks, block_size, packed)
    return _choose(given, k, tuning or (FEW_ROWS if len(scores) <= FEW else MANY_ROWS))


def _choose(given: _Places, k: int, tuning: Tuning) -> Tensor:
    rows, width = len(given.scores), given.width
    padded = triton.next_power_of_2(k)
    assert padded <= 8192, f"two counts share 32 bits: {k} are too many to choose"
    most = max(tuning.most, 2 * padded)
    tensors, numbers, flags = given.arguments()
    group, chosen = 1, None
    if width > most:
        group = min(
            most // padded, triton.next_power_of_2(triton.cdiv(width, max(tuning.maxima, 2 * padded)))
        )
        groups = triton.cdiv(width, group)
        maxima = rows_of_scores(rows, groups, given.scores.device)
        block = max(1, 4096 // group)
        _group_maxima[(triton.cdiv(groups, block), rows)](
            *tensors, maxima, *numbers, groups, maxima.stride(0), **flags, GROUP=group, BLOCK=block,
            num_warps=4,
        )  # fmt: skip
        chosen = _choose(_Places(maxima, groups), k, tuning)
    out = given.scores.new_empty((rows, k), dtype=torch.int32)
    # Never less than a few scores a thread, so that short rows share one variant of the kernel.
    block = max(2048, triton.next_power_of_2(width if chosen is None else k * group))
    _select[(rows,)](
        *tensors, out if chosen is None else chosen, out, *numbers, **flags, LISTED=given.blocks is not None,
        GROUPED=chosen is not None, GROUP=group, K=k, PADDED=padded, BLOCK=block,
        num_warps=min(tuning.warps, tuning.warps * block // 4096),
    )  # fmt: skip
    return out
