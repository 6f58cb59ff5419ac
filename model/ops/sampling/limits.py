"""Where the kept part of a truncated row ends: the range of logits in which it does, collected and searched.

The search goes bit by bit over keys in the order of the logits, by counts for top-k and by weights for top-p.
What was collected stands in the order of the atomics, on which neither sums nor the found key depend.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.sampling.tile import (
    BEFORE,
    BUCKETS,
    CHUNK,
    FIELDS,
    LOWEST,
    RANGE,
    TARGET,
    TIE_MASS,
    TIES,
    bucket,
    keeps,
    largest,
    ordered,
    rule,
    tempered,
    weigh,
)

_SEARCHED = 1024
"""Collected logits searched at once."""


@triton.jit
def _end(histogram, row, target):
    """The first range at which the running sum reaches the target, and the sum before it."""
    b = tl.arange(0, BUCKETS)
    values = tl.load(histogram + row * BUCKETS + b).to(tl.int64)
    cumulative = tl.cumsum(values, 0)
    found = tl.minimum(tl.sum((cumulative < target).to(tl.int32), 0), BUCKETS - 1)
    return found, tl.sum(tl.where(b < found, values, 0), 0)


@triton.jit
def _mass(scratch, n, count, top, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    e = n + tl.arange(0, BLOCK)
    z = tl.load(scratch + e, mask=e < count, other=0).to(tl.float32, bitcast=True)
    if WEIGHED:  # noqa: SIM108
        mass = weigh(z, top)
    else:
        mass = tl.full((BLOCK,), 1, tl.int64)
    return ordered(z), tl.where(e < count, mass, 0)


@triton.jit
def _search(scratch, count, top, target, floor, floor_mass, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that logits of `target` mass reach, the mass above it, and that of one logit at it.

    Keys above `floor` count, and `floor_mass` for all at it.
    """
    found = (count * 0).to(tl.uint32)
    for j in tl.range(0, 16):
        step = tl.sum(tl.full((1,), 1, tl.uint32) << (30 - 2 * j), 0).to(tl.uint32)
        one = tl.where(found + step <= floor, floor_mass, 0)
        two = tl.where(found + 2 * step <= floor, floor_mass, 0)
        three = tl.where(found + 3 * step <= floor, floor_mass, 0)
        for n in tl.range(0, count, BLOCK):
            key, mass = _mass(scratch, n, count, top, WEIGHED, BLOCK)
            mass = tl.where(key > floor, mass, 0)
            one += tl.sum(tl.where(key >= found + step, mass, 0), 0)
            two += tl.sum(tl.where(key >= found + 2 * step, mass, 0), 0)
            three += tl.sum(tl.where(key >= found + 3 * step, mass, 0), 0)
        steps = (
            (one >= target).to(tl.uint32) + (two >= target).to(tl.uint32) + (three >= target).to(tl.uint32)
        )
        found = (found + steps * step).to(tl.uint32)
    above = target * 0
    at = target * 0
    for n in tl.range(0, count, BLOCK):
        key, mass = _mass(scratch, n, count, top, WEIGHED, BLOCK)
        above += tl.sum(tl.where((key > found) & (key > floor), mass, 0), 0)
        at = tl.maximum(at, tl.max(tl.where(key == found, mass, 0), 0))
    return found, above, at


@triton.jit
def _by_weight(scratch, count, top, target, floor, ties, tie_mass, state, BLOCK: tl.constexpr):
    """Where `target` weight ends; `floor`, `ties` and `tie_mass` tell what a top-k before it left."""
    key, above, at = _search(scratch, count, top, target, floor, ties * tie_mass, True, BLOCK)
    needed = (target - above + at - 1) // tl.maximum(at, 1)
    tl.store(state + LOWEST, key.to(tl.int64))
    tl.store(state + TIES, tl.where(key == floor, tl.minimum(needed, ties), needed))
    tl.store(state + TIE_MASS, at)
    tl.store(state + RANGE, target * 0 - 1)


@triton.jit
def _weight_target(sums, row, weight, top_p, state):
    """The weight at which top-p ends, and the range in which it does."""
    target = tl.maximum(tl.ceil(top_p * weight.to(tl.float64)).to(tl.int64), 1)
    wanted, before = _end(sums, row, target)
    tl.store(state + RANGE, wanted.to(tl.int64))
    tl.store(state + BEFORE, before)
    tl.store(state + TARGET, target)
    return wanted, target - before


@triton.jit
def _drops(counts, row, top_k):
    """Whether a row has more ids above -inf than top-k leaves."""
    return tl.sum(tl.load(counts + row * BUCKETS + tl.arange(0, BUCKETS)), 0) > top_k


@triton.jit
def _begin(rules, tops, counts, sums, state, rows, size, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, _, top_k, top_p = rule(rules, rows, row, size)
    top = largest(tops, row, CHUNKS, PADDED)
    state += row * FIELDS
    tl.store(state + LOWEST, row * 0)
    tl.store(state + TIES, row * 0)
    tl.store(state + TIE_MASS, row * 0)
    tl.store(state + RANGE, row * 0 - 1)
    if top == top:
        if (top_k < size) & _drops(counts, row, top_k):
            wanted, before = _end(counts, row, top_k)
            tl.store(state + RANGE, wanted.to(tl.int64))
            tl.store(state + BEFORE, before)
            tl.store(state + TARGET, top_k)
        elif top_p < 1.0:
            b = tl.arange(0, BUCKETS)
            _weight_target(sums, row, tl.sum(tl.load(sums + row * BUCKETS + b), 0), top_p, state)


@triton.jit
def _collect(
    logits,
    rules,
    tops,
    state,
    found,
    scratch,
    rows,
    size,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the logits of the range that a row looks into."""
    row = tl.program_id(1).to(tl.int64)
    wanted = tl.load(state + row * FIELDS + RANGE)
    if wanted >= 0:
        ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        temperature, _, _, _ = rule(rules, rows, row, size)
        top = largest(tops, row, CHUNKS, PADDED)
        z = tempered(logits + row * stride, ids, ids < size, temperature)
        inside = (z > float("-inf")) & (bucket(z, top) == wanted)
        ones = tl.full((BLOCK,), 1, tl.int32)
        place = tl.atomic_add(found + row + ids * 0, ones, mask=inside, sem="relaxed")
        tl.store(scratch + row * size + place, z.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _narrow(
    rules,
    tops,
    counts,
    sums,
    state,
    found,
    scratch,
    rows,
    size,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Search what was collected; a top-p after a top-k may end in a range that is still to be collected."""
    row = tl.program_id(0).to(tl.int64)
    state += row * FIELDS
    wanted = tl.load(state + RANGE)
    if wanted >= 0:
        _, _, top_k, top_p = rule(rules, rows, row, size)
        top = largest(tops, row, CHUNKS, PADDED)
        scratch += row * size
        count = tl.load(found + row)
        left = tl.load(state + TARGET) - tl.load(state + BEFORE)
        none = left * 0
        if (top_k < size) & _drops(counts, row, top_k):
            key, above, _one = _search(scratch, count, top, left, none.to(tl.uint32), none, False, BLOCK)
            ties = left - above
            weight = none
            tie_mass = none
            for n in tl.range(0, count, BLOCK):
                keys, mass = _mass(scratch, n, count, top, True, BLOCK)
                weight += tl.sum(tl.where(keys > key, mass, 0), 0)
                tie_mass = tl.maximum(tie_mass, tl.max(tl.where(keys == key, mass, 0), 0))
            tl.store(state + LOWEST, key.to(tl.int64))
            tl.store(state + TIES, ties)
            tl.store(state + TIE_MASS, tie_mass)
            tl.store(state + RANGE, none - 1)
            if top_p < 1.0:
                b = tl.arange(0, BUCKETS)
                values = tl.load(sums + row * BUCKETS + b)
                weight += tl.sum(tl.where(b < wanted, values, 0), 0) + ties * tie_mass
                following, target = _weight_target(sums, row, weight, top_p, state)
                if following == wanted:
                    _by_weight(scratch, count, top, target, key, ties, tie_mass, state, BLOCK)
        else:
            _by_weight(scratch, count, top, left, none.to(tl.uint32), none, none, state, BLOCK)


@triton.jit
def _narrow_again(
    tops, state, found, scratch, size, CHUNKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    state += row * FIELDS
    if tl.load(state + RANGE) >= 0:
        top = largest(tops, row, CHUNKS, PADDED)
        left = tl.load(state + TARGET) - tl.load(state + BEFORE)
        none = left * 0
        count = tl.load(found + row)
        _by_weight(scratch + row * size, count, top, left, none.to(tl.uint32), none, none, state, BLOCK)


@triton.jit
def _count(
    logits,
    rules,
    tops,
    state,
    kept,
    rows,
    size,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each chunk: ids above the lowest key, ids at it, and the weight of those above."""
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    temperature, _greedy, top_k, top_p = rule(rules, rows, row, size)
    if (top_k < size) | (top_p < 1.0):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        top = largest(tops, row, CHUNKS, PADDED)
        lowest = tl.load(state + row * FIELDS + LOWEST).to(tl.uint32)
        z = tempered(logits + row * stride, ids, ids < size, temperature)
        key = ordered(z)
        above = (key > lowest) & (z > float("-inf"))
        equal = (key == lowest) & (z > float("-inf"))
        at = kept + row * 3 * CHUNKS + chunk
        tl.store(at, tl.sum(above.to(tl.int64), 0))
        tl.store(at + CHUNKS, tl.sum(equal.to(tl.int64), 0))
        tl.store(at + 2 * CHUNKS, tl.sum(tl.where(above, weigh(z, top), 0), 0))


@triton.jit
def _list(
    logits,
    rules,
    state,
    kept,
    out,
    rows,
    size,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the kept ids of each chunk in order, after those of the chunks before it."""
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    temperature, _, top_k, top_p = rule(rules, rows, row, size)
    if (top_k < size) | (top_p < 1.0):
        c = tl.arange(0, PADDED)
        earlier = c < chunk
        at = kept + row * 3 * CHUNKS + c
        ties = tl.load(state + row * FIELDS + TIES)
        lowest = tl.load(state + row * FIELDS + LOWEST).to(tl.uint32)
        ties_before = tl.sum(tl.load(at + CHUNKS, mask=earlier, other=0), 0)
        begin = tl.sum(tl.load(at, mask=earlier, other=0), 0) + tl.minimum(ties_before, ties)
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        keep = keeps(tempered(logits + row * stride, ids, ids < size, temperature), lowest, ties, ties_before)
        place = begin + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(out + row * size + place, ids, mask=keep)


class Limits:
    """Where the truncated ones of some rows end.

    Attributes:
        counts, sums: [B, BUCKETS] ids and weights of each range of logits.
        state: [B, FIELDS] int64, see `model.ops.sampling.tile`.
        kept: [B, 3, chunks] int64, of each chunk: ids above the lowest key, ids at it, weight above it.
        ids: [B, V] int32, the kept ones first.
    """

    def __init__(self, logits: Tensor, rules: Tensor) -> None:
        rows, size = logits.shape
        self._logits, self._rules, self._chunks = logits, rules, triton.cdiv(size, CHUNK)
        self._found = logits.new_zeros((2, rows), dtype=torch.int32)
        self.counts = logits.new_zeros((rows, BUCKETS.value), dtype=torch.int32)
        self.sums = logits.new_zeros((rows, BUCKETS.value), dtype=torch.int64)
        self.state = logits.new_empty((rows, FIELDS.value), dtype=torch.int64)
        self.kept = logits.new_empty((rows, 3, self._chunks), dtype=torch.int64)
        self.ids = logits.new_empty((rows, size), dtype=torch.int32)

    def find(self, tops: Tensor, searches: int) -> None:
        """Fill `state`, `kept` and `ids`; `searches` is 2 where a row has both top-k and top-p, else 1."""
        logits, rules, state, scratch = self._logits, self._rules, self.state, self.ids
        (rows, size), at = logits.shape, (*logits.shape, logits.stride(0))
        shape = {"CHUNKS": self._chunks, "PADDED": triton.next_power_of_2(self._chunks)}
        chunked = shape | {"BLOCK": CHUNK, "num_warps": 8}
        searched = shape | {"BLOCK": _SEARCHED, "num_warps": 4}
        grid = (self._chunks, rows)
        _begin[(rows,)](rules, tops, self.counts, self.sums, state, rows, size, **shape, num_warps=4)
        _collect[grid](logits, rules, tops, state, self._found[0], scratch, *at, **chunked)
        _narrow[(rows,)](
            rules, tops, self.counts, self.sums, state, self._found[0], scratch, rows, size, **searched
        )
        if searches > 1:
            _collect[grid](logits, rules, tops, state, self._found[1], scratch, *at, **chunked)
            _narrow_again[(rows,)](tops, state, self._found[1], scratch, size, **searched)
        _count[grid](logits, rules, tops, state, self.kept, *at, **chunked)
        _list[grid](logits, rules, state, self.kept, self.ids, *at, **chunked)
