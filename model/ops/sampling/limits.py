"""What top-k and top-p leave of a row: candidates, the lowest logit that stays, and what is drawn and listed.

The ranges of logits in which ids were counted tell in which of them an id may stay. Those candidates are laid
side by side in the order of their ids, a few thousand of a vocabulary. One program a row then searches where
the kept part ends, over keys in the order of the logits, by counts for top-k and by weights for top-p.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor

from model.ops.sampling.tile import (
    CHUNK,
    ONE,
    RANGES,
    begin_of,
    distance,
    largest,
    number,
    ordered,
    rule,
    tempered,
    threshold,
    weigh,
)
from model.ops.tile import INTERPRET

WARPS = 16
"""Of the pass that counts ranges of a chunk: fewer need more registers than leave room for other programs."""


@triton.jit
def count_ranges(logits, z, top):
    """How many z, those of logits above -inf, lie in each range below the largest, [RANGES] int32."""
    counts = tl.histogram(tl.minimum(distance(z, top), RANGES - 1.0).to(tl.int32), RANGES)
    none = tl.sum((logits == float("-inf")).to(tl.int32), 0)
    return counts - tl.where(tl.arange(0, RANGES) == RANGES - 1, none, 0)


@triton.jit
def _last_range(counts, total, top_k, top_p, size):
    """The last range in which an id can stay, of those that hold `counts` ids [RANGES] of `total` weight."""
    b = tl.arange(0, RANGES)
    by_count = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0)
    # Behind a range stand ids of no more than this weight; the ends of ranges and weights are rounded.
    most = tl.where(b[None, :] > b[:, None], (counts * tl.exp(-begin_of(b)))[None, :], 0.0)
    behind = tl.sum(most.to(tl.float64), 1) * (1.001 * ONE) + size + 4096.0
    by_weight = tl.sum((behind > (1.0 - top_p) * total.to(tl.float64)).to(tl.int32), 0)
    return tl.minimum(tl.where(top_k < size, by_count, by_weight), RANGES - 1)


@triton.jit(do_not_specialize=["rows"])
def _bounds(rules, tops, masses, counts, places, rows, size, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """Where each chunk's candidates end, then the row's last range: -1 where nothing is dropped."""
    row = tl.program_id(0).to(tl.int64)
    _, _, top_k, top_p = rule(rules, rows, row, size)
    top = largest(tops, row, CHUNKS, PADDED)
    places += row * (CHUNKS + 1)
    if ((top_k < size) | (top_p < 1.0)) & (top == top):
        c = tl.arange(0, PADDED)
        total = tl.sum(tl.load(masses + row * CHUNKS + c, mask=c < CHUNKS, other=0), 0)
        b = tl.arange(0, RANGES)
        at = counts + (row * CHUNKS + c[:, None]) * RANGES + b[None, :]
        each = tl.load(at, mask=(c < CHUNKS)[:, None], other=0)
        last = _last_range(tl.sum(each, 0), total, top_k, top_p, size)
        own = tl.sum(tl.where(b[None, :] <= last, each, 0), 1)
        tl.store(places + c, tl.cumsum(own, 0), mask=c < CHUNKS)
        tl.store(places + CHUNKS, last)
    else:
        tl.store(places + CHUNKS, -1)


@triton.jit(do_not_specialize=["rows"])
def _collect(
    logits,
    rules,
    tops,
    places,
    found,
    rows,
    size,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store key and id of a chunk's candidates behind those of the chunks before it."""
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    places += row * (CHUNKS + 1)
    last = tl.load(places + CHUNKS)
    begin = tl.load(places + chunk - 1, mask=chunk > 0, other=0)
    if (last >= 0) & (tl.load(places + chunk) > begin):
        temperature, _, _, _ = rule(rules, rows, row, size)
        top = largest(tops, row, CHUNKS, PADDED)
        # Lines of 128 ids, each scanned within a warp, then the ends of lines.
        lines = tl.arange(0, BLOCK // 128)
        ids = chunk * BLOCK + lines[:, None] * 128 + tl.arange(0, 128)[None, :]
        z = tempered(logits + row * stride, ids, ids < size, temperature)
        # The last range has no end: a distance is RANGES at most, and ends there before RANGES + 1.
        end = tl.where(last == RANGES - 1, RANGES + 1.0, last + 1.0)
        stays = ((z > float("-inf")) & (distance(z, top) < end)).to(tl.int32)
        total = tl.sum(stays, 1)
        place = (begin + tl.cumsum(total, 0) - total)[:, None] + tl.cumsum(stays, 1) - 1
        tl.store(found + row * size + place, (ordered(z).to(tl.int64) << 32) | ids, mask=stays > 0)


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _sums(a, b, c):
    """Three sums through one exchange between warps."""
    if INTERPRET:  # noqa: SIM108
        sums = tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)
    else:
        sums = tl.reduce((a, b, c), 0, _add_three)
    return sums


@triton.jit
def _candidates(found, weights, n, count, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and masses (weights, or 1 each) of a block of candidates; no mass beyond the last."""
    e = n + tl.arange(0, BLOCK)
    key = tl.load(found + e, mask=e < count, other=0) >> 32
    if WEIGHED:  # noqa: SIM108
        mass = tl.load(weights + e, mask=e < count, other=0)
    else:
        mass = (e < count).to(tl.int64)
    return key & 0xFFFFFFFF, mass


@triton.jit
def _search(
    found, weights, count, low, high, target, floor, floor_mass, WEIGHED: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key that candidates of `target` mass reach, the mass above it, and that of one at it.

    Keys lie in [low, high], and those of `low` reach the target. Candidates above `floor` count, and
    `floor_mass` for all at it. The first block stays in registers.
    """
    first, first_mass = _candidates(found, weights, 0, count, WEIGHED, BLOCK)
    first_mass = tl.where(first > floor, first_mass, 0)
    pairs = tl.arange(0, 16)
    rounds = tl.sum(((high - low) >> (2 * pairs) > 0).to(tl.int32), 0)
    end = low
    for j in tl.range(0, rounds):
        step = (target * 0 + 1) << (2 * (rounds - 1 - j))
        one, two, three = _sums(
            tl.where(first >= end + step, first_mass, 0),
            tl.where(first >= end + 2 * step, first_mass, 0),
            tl.where(first >= end + 3 * step, first_mass, 0),
        )
        for n in tl.range(BLOCK, count, BLOCK):
            key, mass = _candidates(found, weights, n, count, WEIGHED, BLOCK)
            mass = tl.where(key > floor, mass, 0)
            more = _sums(
                tl.where(key >= end + step, mass, 0),
                tl.where(key >= end + 2 * step, mass, 0),
                tl.where(key >= end + 3 * step, mass, 0),
            )
            one += more[0]
            two += more[1]
            three += more[2]
        one += tl.where(end + step <= floor, floor_mass, 0)
        two += tl.where(end + 2 * step <= floor, floor_mass, 0)
        three += tl.where(end + 3 * step <= floor, floor_mass, 0)
        steps = (one >= target).to(tl.int64) + (two >= target).to(tl.int64) + (three >= target).to(tl.int64)
        end += steps * step
    above, at = _weight_above(found, weights, count, tl.maximum(end, floor), WEIGHED, BLOCK)
    return end, above, at


@triton.jit
def _weight_above(found, weights, count, end, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of candidates above a key, and of one that has it."""
    above = end * 0
    at = end * 0
    for n in tl.range(0, count, BLOCK):
        key, mass = _candidates(found, weights, n, count, WEIGHED, BLOCK)
        above += tl.sum(tl.where(key > end, mass, 0), 0)
        at = tl.maximum(at, tl.max(tl.where(key == end, mass, 0), 0))
    return above, at


@triton.jit
def _weigh_candidates(found, weights, count, top, BLOCK: tl.constexpr):
    """Store the weight of each candidate; the lowest and the highest key, and the sum."""
    low = tl.full((), 0xFFFFFFFF, tl.int64)
    high = tl.full((), 0, tl.int64)
    total = tl.full((), 0, tl.int64)
    for n in tl.range(0, count, BLOCK):
        e = n + tl.arange(0, BLOCK)
        inside = e < count
        key = (tl.load(found + e, mask=inside, other=0) >> 32) & 0xFFFFFFFF
        mass = tl.where(inside, weigh(number(key), top), 0)
        tl.store(weights + e, mass, mask=inside)
        low = tl.minimum(low, tl.min(tl.where(inside, key, 0xFFFFFFFF), 0))
        high = tl.maximum(high, tl.max(tl.where(inside, key, 0), 0))
        total += tl.sum(mass, 0)
    tl.debug_barrier()
    return low, high, total


@triton.jit
def _limits(found, weights, count, total, top, top_k, top_p, size, BLOCK: tl.constexpr):
    """The lowest key that stays, how many of those that have it, the weight of one and of all above it."""
    low, high, above = _weigh_candidates(found, weights, count, top, BLOCK)
    none = low * 0
    end = low - 1
    ties = none
    tie_mass = none
    if (top_k < size) & (count > top_k):
        end, number_above, _one = _search(
            found, weights, count, low, high, top_k, none - 1, none, False, BLOCK
        )
        ties = top_k - number_above
        above, tie_mass = _weight_above(found, weights, count, end, True, BLOCK)
    if top_p < 1.0:
        # Without a top-k all ids weigh, candidates or not.
        weight = tl.where(top_k < size, above + ties * tie_mass, total)
        target = tl.minimum(tl.ceil(top_p * weight.to(tl.float64)).to(tl.int64), weight)
        target = tl.maximum(target, 1)
        floor, left = end, ties
        end, above, tie_mass = _search(
            found, weights, count, tl.maximum(low, floor), high, target, floor, ties * tie_mass, True, BLOCK
        )
        ties = (target - above + tie_mass - 1) // tl.maximum(tie_mass, 1)
        ties = tl.where(end == floor, tl.minimum(ties, left), ties)
    return end, ties, tie_mass, above


@triton.jit
def draw_kept(found, weights, ids, count, total, top, draw, top_k, top_p, size, BLOCK: tl.constexpr):
    """List what stays of a row's candidates, and draw from it: the token, the weight, and how many ids."""
    end, ties, tie_mass, above = _limits(found, weights, count, total, top, top_k, top_p, size, BLOCK)
    weight = above + ties * tie_mass
    limit = threshold(draw, weight)
    passed = count * 0
    before = limit * 0
    ranks = limit * 0
    for n in tl.range(0, count, BLOCK):
        e = n + tl.arange(0, BLOCK)
        one = tl.load(found + e, mask=e < count, other=0)
        key, mass = _candidates(found, weights, n, count, True, BLOCK)
        higher = (key > end) & (e < count)
        equal = (key == end) & (e < count)
        # Ids above the lowest key are counted in the upper half, those at it in the lower.
        rank = ranks + tl.cumsum((higher.to(tl.int64) << 32) + equal.to(tl.int64), 0)
        tied = rank & 0xFFFFFFFF
        cumulative = before + tl.cumsum(tl.where(higher, mass, 0), 0)
        passed += tl.sum(
            ((cumulative + tl.minimum(tied, ties) * tie_mass <= limit) & (e < count)).to(tl.int32), 0
        )
        place = (rank >> 32) + tl.minimum(tied, ties) - 1
        tl.store(ids + place, (one & 0xFFFFFFFF).to(tl.int32), mask=higher | (equal & (tied <= ties)))
        before = tl.max(cumulative, 0)
        ranks = tl.max(rank, 0)
    token = tl.load(found + tl.minimum(passed, count - 1)) & 0xFFFFFFFF
    return token.to(tl.int32), weight, ((ranks >> 32) + tl.minimum(ranks & 0xFFFFFFFF, ties)).to(tl.int32)


def collect(
    logits: Tensor, rules: Tensor, tops: Tensor, masses: Tensor, counts: Tensor, found: Tensor
) -> Tensor:
    """Fill `found` [B, V] int64 with the candidates of truncated rows.

    Returns:
        Where those of each chunk end, and one number more: [B, chunks + 1] int32.
    """
    (rows, size), chunks = logits.shape, tops.shape[1]
    places = counts.new_empty((rows, chunks + 1))
    shape = {"CHUNKS": chunks, "PADDED": triton.next_power_of_2(chunks)}
    _bounds[(rows,)](rules, tops, masses, counts, places, rows, size, **shape, num_warps=2)
    shape |= {"BLOCK": CHUNK, "num_warps": 8}
    _collect[(chunks, rows)](logits, rules, tops, places, found, rows, size, logits.stride(0), **shape)
    return places
