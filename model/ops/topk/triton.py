"""Exact top-k by group maxima: the k-th largest maximum bounds the k-th largest score from below.

Only groups whose maximum reaches the bound are read (about k of 4096); what survives is compacted in column
order and searched bit by bit. A row with more survivors than the buffer (long runs of equal scores) is
searched in place. Counts and prefix sums only, no atomics: the same set in the same order every time.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_SURVIVORS = 2048
_POSTPONED = tl.constexpr(-2)


@dataclass(frozen=True)
class Tuning:
    """Groups of a row, scores read at once, warps, and whether long ties are searched in the same kernel."""

    groups: int
    read: int
    warps: int
    in_place: bool


FEW_ROWS = Tuning(groups=4096, read=4096, warps=8, in_place=True)
MANY_ROWS = Tuning(groups=2048, read=2048, warps=4, in_place=False)


@triton.jit
def _ordered(x):
    """fp32 -> uint32 in the same order; -0 equals +0; -inf and NaN become 0, below everything."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(x > float("-inf"), key, 0)


@triton.jit
def _step(round_number):
    """1 << (30 - 2 * round) as a uint32 scalar."""
    return tl.sum(tl.full((1,), 1, tl.uint32) << (30 - 2 * round_number), 0).to(tl.uint32)


@triton.jit
def _advance(threshold, step, counts, K: tl.constexpr):
    """Raise the threshold by the largest of 1..3 steps that still has K keys; counts as in `_packed`."""
    c1 = counts & 0x1FFFFF
    c2 = (counts >> 21) & 0x1FFFFF
    c3 = counts >> 42
    raised = tl.where(c1 >= K, threshold + step, threshold)
    raised = tl.where(c2 >= K, threshold + 2 * step, raised)
    return tl.where(c3 >= K, threshold + 3 * step, raised).to(tl.uint32)


@triton.jit
def _packed(keys, threshold, step):
    """Whether each key reaches one, two and three steps above the threshold, as counts of 21 bits."""
    one = (keys >= threshold + step).to(tl.int64)
    two = (keys >= threshold + 2 * step).to(tl.int64)
    three = (keys >= threshold + 3 * step).to(tl.int64)
    return one + (two << 21) + (three << 42)


@triton.jit
def _kth(keys, K: tl.constexpr, ROUNDS: tl.constexpr):
    """The largest t, to 2 * ROUNDS leading bits, that at least K keys reach; 0 with fewer than K."""
    threshold = tl.min(keys, 0) * 0
    for j in tl.range(0, ROUNDS):
        step = _step(j)
        threshold = _advance(threshold, step, tl.sum(_packed(keys, threshold, step), 0), K)
    return threshold


@triton.jit
def _group_maxima(
    scores,
    begins,
    ends,
    maxima,
    stride,
    width,
    HAS_BEGINS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = 0
    end = width
    if HAS_BEGINS:
        begin = tl.load(begins + row)
    if HAS_ENDS:
        end = tl.load(ends + row)
    column = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(scores + row * stride + column, mask=(column >= begin) & (column < end), other=float("-inf"))
    largest = tl.max(tl.where(x > float("-inf"), x, float("-inf")), 1)
    tl.store(maxima + row * GROUPS + g, _ordered(largest).to(tl.int32, bitcast=True))


@triton.jit
def _read(scores, column, inside, begin, end):
    x = tl.load(scores + column, mask=inside & (column >= begin) & (column < end), other=float("-inf"))
    return _ordered(x)


@triton.jit
def _emit(keys, column, threshold, need, equal_before, base, out, K: tl.constexpr):
    """Store the chosen columns of a tile in order; returns how many equal the threshold, how many chosen."""
    above = keys > threshold
    equal = (keys == threshold) & (keys > 0)
    rank = equal_before + tl.cumsum(equal.to(tl.int32), 0)
    take = above | (equal & (rank <= need))
    position = base + tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(out + position, column, mask=take & (position < K))
    return tl.sum(equal.to(tl.int32), 0), tl.sum(take.to(tl.int32), 0)


@triton.jit
def _count_above(scores, begin, end, threshold, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    first = begin // BLOCK * BLOCK
    above = tl.zeros((BLOCK,), tl.int32)
    for n in tl.range(first, end, BLOCK):
        above += (_read(scores, n + c, c >= 0, begin, end) > threshold).to(tl.int32)
    return tl.sum(above, 0)


@triton.jit
def _select_in_place(scores, begin, end, bound, out, K: tl.constexpr, BLOCK: tl.constexpr):
    """The search over the whole row, for rows with too many candidates; returns how many were chosen.

    `bound` is the K-th largest group maximum. Such rows mostly have a long run of scores equal to it, and
    then fewer than K are above it and it is the threshold; else the search goes bit by bit.
    """
    c = tl.arange(0, BLOCK)
    first = begin // BLOCK * BLOCK
    threshold = bound
    above = _count_above(scores, begin, end, threshold, BLOCK)
    if above >= K:
        threshold = (first * 0).to(tl.uint32)
        for j in tl.range(0, 16):
            step = _step(j)
            counts = tl.zeros((BLOCK,), tl.int64)
            for n in tl.range(first, end, BLOCK):
                counts += _packed(_read(scores, n + c, c >= 0, begin, end), threshold, step)
            threshold = _advance(threshold, step, tl.sum(counts, 0), K)
        above = _count_above(scores, begin, end, threshold, BLOCK)
    equal = first * 0
    base = first * 0
    for n in tl.range(first, end, BLOCK):
        keys = _read(scores, n + c, c >= 0, begin, end)
        seen, taken = _emit(keys, n + c, threshold, K - above, equal, base, out, K)
        equal += seen
        base += taken
    return base


@triton.jit
def _select(
    scores,
    begins,
    ends,
    maxima,
    groups,
    survivors,
    out,
    stride,
    width,
    HAS_BEGINS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SURVIVORS: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = 0
    end = width
    if HAS_BEGINS:
        begin = tl.load(begins + row)
    if HAS_ENDS:
        end = tl.load(ends + row)
    scores += row * stride
    out += row * K
    g = tl.arange(0, GROUPS)
    top = tl.load(maxima + row * GROUPS + g).to(tl.uint32, bitcast=True)
    bound = _kth(top, K, 12)
    chosen = (top >= bound) & (top > 0)
    tl.store(groups + row * GROUPS + tl.cumsum(chosen.to(tl.int32), 0) - 1, g, mask=chosen)
    count = tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()

    e = tl.arange(0, BLOCK * GROUP)
    found = count * 0
    keys_out = survivors + row * 2 * SURVIVORS
    for j in tl.range(0, count, BLOCK):
        inside = j + e // GROUP < count
        column = tl.load(groups + row * GROUPS + j + e // GROUP, mask=inside, other=0) * GROUP + e % GROUP
        keys = _read(scores, column, inside, begin, end)
        keep = (keys >= bound) & (keys > 0)
        position = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        fits = keep & (position < SURVIVORS)
        tl.store(keys_out + position, keys.to(tl.int32, bitcast=True), mask=fits)
        tl.store(keys_out + SURVIVORS + position, column, mask=fits)
        found += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()

    p = tl.arange(0, K_PADDED)
    if found <= SURVIVORS:
        c = tl.arange(0, SURVIVORS)
        keys = tl.load(keys_out + c, mask=c < found, other=0).to(tl.uint32, bitcast=True)
        column = tl.load(keys_out + SURVIVORS + c, mask=c < found, other=0)
        threshold = _kth(keys, K, 16)
        need = K - tl.sum((keys > threshold).to(tl.int32), 0)
        _, taken = _emit(keys, column, threshold, need, found * 0, found * 0, out, K)
        tl.store(out + p, p * 0 - 1, mask=(p >= taken) & (p < K))
    elif IN_PLACE:
        taken = _select_in_place(scores, begin, end, _kth(top, K, 16), out, K, 4096)
        tl.store(out + p, p * 0 - 1, mask=(p >= taken) & (p < K))
    else:
        tl.store(out, found * 0 + _POSTPONED)


@triton.jit
def _select_postponed(
    scores,
    begins,
    ends,
    maxima,
    out,
    stride,
    width,
    HAS_BEGINS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The search in place of the rows that `_select` left; a kernel of its own keeps its registers few."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row * K) == _POSTPONED:
        begin = 0
        end = width
        if HAS_BEGINS:
            begin = tl.load(begins + row)
        if HAS_ENDS:
            end = tl.load(ends + row)
        top = tl.load(maxima + row * GROUPS + tl.arange(0, GROUPS)).to(tl.uint32, bitcast=True)
        bound = _kth(top, K, 16)
        taken = _select_in_place(scores + row * stride, begin, end, bound, out + row * K, K, 4096)
        p = tl.arange(0, K_PADDED)
        tl.store(out + row * K + p, p * 0 - 1, mask=(p >= taken) & (p < K))


def topk(
    scores: Tensor,
    k: int,
    *,
    begins: Tensor | None = None,
    ends: Tensor | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """See `model.ops.topk.topk`; the result does not depend on `tuning` (for tests and benchmarks)."""
    rows, width = scores.shape
    tuning = tuning or (FEW_ROWS if rows <= 256 else MANY_ROWS)
    assert width < 2**21, f"counts have 21 bits: a row of {width} scores is too long"
    assert scores.stride(1) == 1, "scores must be contiguous along the row"
    padded = triton.next_power_of_2(k)
    groups = max(padded, min(triton.next_power_of_2(width), tuning.groups))
    group = max(1, triton.next_power_of_2(triton.cdiv(width, groups)))
    survivors = max(_SURVIVORS, 2 * padded)
    scratch = scores.new_empty((3, rows, groups), dtype=torch.int32)
    kept = scores.new_empty((rows, 2, survivors), dtype=torch.int32)
    out = scores.new_empty((rows, k), dtype=torch.int32)
    flags = {"HAS_BEGINS": begins is not None, "HAS_ENDS": ends is not None}
    begins, ends = (scores if x is None else x for x in (begins, ends))
    block = min(groups, max(1, 4096 // group))
    _group_maxima[(groups // block, rows)](
        scores,
        begins,
        ends,
        scratch[0],
        scores.stride(0),
        width,
        **flags,
        GROUP=group,
        GROUPS=groups,
        BLOCK=block,
        num_warps=4,
    )
    _select[(rows,)](
        scores,
        begins,
        ends,
        scratch[0],
        scratch[1],
        kept,
        out,
        scores.stride(0),
        width,
        **flags,
        K=k,
        K_PADDED=padded,
        GROUP=group,
        GROUPS=groups,
        BLOCK=max(1, tuning.read // group),
        SURVIVORS=survivors,
        IN_PLACE=tuning.in_place,
        num_warps=tuning.warps,
    )
    if not tuning.in_place:
        _select_postponed[(rows,)](
            scores,
            begins,
            ends,
            scratch[0],
            out,
            scores.stride(0),
            width,
            **flags,
            K=k,
            K_PADDED=padded,
            GROUPS=groups,
            num_warps=8,
        )
    return out
