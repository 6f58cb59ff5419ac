"""Sampling without sorting: chunks of a row in parallel, then one program a row.

Two passes over the chunks find the largest logit and sum the integer weights. Where a row is truncated, the
second pass also counts and weighs 2048 ranges below the largest logit; the range in which top-k or top-p ends
is then collected and searched bit by bit, and what is kept is listed in the order of ids. Integer sums only:
the same tokens whatever the order of the atomics, the batch, or the size of the chunks.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.sampling.reference import WEIGHT_BITS, Drawn, Rules

CHUNK = 4096
_BUCKETS = tl.constexpr(2048)
_PER_UNIT = tl.constexpr(64.0)
_ONE = tl.constexpr(float(2**WEIGHT_BITS))
_INCREMENT = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    x = x + _INCREMENT
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position):
    """The draw in [0, 1) of a seed (bits) at a position, fp64: see `reference.uniforms`."""
    mixed = _mix(seed.to(tl.uint64, bitcast=True))
    bits = _mix(mixed ^ (position.to(tl.uint64, bitcast=True) * _INCREMENT)) >> 16
    return bits.to(tl.int64, bitcast=True).to(tl.float64) * 3.552713678800501e-15


@triton.jit
def _rule(rules, rows, row, size):
    """Temperature, whether greedy, top-k (`size` for none), top-p (1 for none)."""
    temperature = tl.load(rules + row).to(tl.float64, bitcast=True)
    top_p = tl.load(rules + rows + row).to(tl.float64, bitcast=True)
    top_k = tl.load(rules + 2 * rows + row)
    greedy = temperature == 0.0
    top_k = tl.where((top_k <= 0) | (top_k > size) | greedy, size, top_k)
    temperature = tl.where(greedy, 1.0, temperature).to(tl.float32)
    return temperature, greedy, top_k, tl.where(greedy, 1.0, top_p)


@triton.jit
def _tempered(logits, ids, inside, temperature):
    z = tl.load(logits + ids, mask=inside, other=float("-inf"))
    z = tl.div_rn(z, temperature)
    return tl.where(z == 0.0, 0.0, z)


@triton.jit
def weigh(z, top):
    """Integer weights of logits, given the largest of their row: see `reference.weights`."""
    relative = tl.exp(z.to(tl.float64) - top.to(tl.float64))
    return tl.where(relative == relative, relative * _ONE + 0.5, 0.0).to(tl.int64)


@triton.jit
def _bucket(z, top):
    """Which of the ranges below the largest logit, rising as z falls; the last one takes the rest."""
    return tl.minimum((top - z) * _PER_UNIT, _BUCKETS - 1.0).to(tl.int32)


@triton.jit
def _ordered(z):
    """fp32 -> uint32 in the same order."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def largest(tops, row, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """The largest logit of a row, NaN where the row is not finite."""
    c = tl.arange(0, PADDED)
    top = tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    broken = tl.max((top != top).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(top == top, top, float("-inf")), 0)
    return tl.where(broken | (highest - highest != 0.0), float("nan"), highest)


@triton.jit
def _tops(logits, rules, tops, rows, size, stride, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    temperature, _, _, _ = _rule(rules, rows, row, size)
    z = _tempered(logits + row * stride, ids, ids < size, temperature)
    broken = tl.max((z != z).to(tl.int32), 0) > 0
    top = tl.max(tl.where(z == z, z, float("-inf")), 0)
    tl.store(tops + row * CHUNKS + chunk, tl.where(broken, float("nan"), top))


@triton.jit
def _masses(
    logits,
    rules,
    tops,
    masses,
    counts,
    sums,
    rows,
    size,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    TRUNCATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    temperature, _, top_k, top_p = _rule(rules, rows, row, size)
    top = largest(tops, row, CHUNKS, PADDED)
    z = _tempered(logits + row * stride, ids, ids < size, temperature)
    mass = weigh(z, top)
    tl.store(masses + row * CHUNKS + chunk, tl.sum(mass, 0))
    if TRUNCATE:  # noqa: SIM102
        if ((top_k < size) | (top_p < 1.0)) & (top == top):
            at = row * _BUCKETS + _bucket(z, top)
            if top_k < size:
                ones = tl.full((BLOCK,), 1, tl.int32)
                tl.atomic_add(counts + at, ones, mask=z > float("-inf"), sem="relaxed")
            if top_p < 1.0:
                tl.atomic_add(sums + at, mass, mask=mass > 0, sem="relaxed")


@triton.jit
def _end(histogram, row, target):
    """The first range at which the running sum reaches the target, and the sum before it."""
    b = tl.arange(0, _BUCKETS)
    values = tl.load(histogram + row * _BUCKETS + b).to(tl.int64)
    cumulative = tl.cumsum(values, 0)
    found = tl.minimum(tl.sum((cumulative < target).to(tl.int32), 0), _BUCKETS - 1)
    return found, tl.sum(tl.where(b < found, values, 0), 0)


@triton.jit
def _collect(logits, temperature, top, wanted, scratch, size, lowest, ties, BLOCK: tl.constexpr):
    """List the logits of one range among those kept so far; returns how many."""
    e = tl.arange(0, BLOCK)
    found = wanted * 0
    tied = wanted * 0
    for n in tl.range(0, size, BLOCK):
        z = _tempered(logits, n + e, n + e < size, temperature)
        inside = (z > float("-inf")) & (_bucket(z, top) == wanted)
        key = _ordered(z)
        equal = (inside & (key == lowest)).to(tl.int32)
        keep = inside & ((key > lowest) | ((equal > 0) & (tied + tl.cumsum(equal, 0) <= ties)))
        place = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(scratch + place, z.to(tl.int32, bitcast=True), mask=keep)
        found += tl.sum(keep.to(tl.int32), 0)
        tied += tl.sum(equal, 0)
    return found


@triton.jit
def _mass(scratch, n, count, top, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    e = n + tl.arange(0, BLOCK)
    z = tl.load(scratch + e, mask=e < count, other=0).to(tl.float32, bitcast=True)
    if WEIGHED:  # noqa: SIM108
        mass = weigh(z, top)
    else:
        mass = tl.full((BLOCK,), 1, tl.int64)
    return _ordered(z), tl.where(e < count, mass, 0)


@triton.jit
def _search(scratch, count, top, target, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """Largest key that logits of `target` mass reach: the key, the mass above it, and that of one at it."""
    threshold = (count * 0).to(tl.uint32)
    for j in tl.range(0, 16):
        step = tl.sum(tl.full((1,), 1, tl.uint32) << (30 - 2 * j), 0).to(tl.uint32)
        one = target * 0
        two = target * 0
        three = target * 0
        for n in tl.range(0, count, BLOCK):
            key, mass = _mass(scratch, n, count, top, WEIGHED, BLOCK)
            one += tl.sum(tl.where(key >= threshold + step, mass, 0), 0)
            two += tl.sum(tl.where(key >= threshold + 2 * step, mass, 0), 0)
            three += tl.sum(tl.where(key >= threshold + 3 * step, mass, 0), 0)
        steps = (
            (one >= target).to(tl.uint32) + (two >= target).to(tl.uint32) + (three >= target).to(tl.uint32)
        )
        threshold = (threshold + steps * step).to(tl.uint32)
    above = target * 0
    at = target * 0
    for n in tl.range(0, count, BLOCK):
        key, mass = _mass(scratch, n, count, top, WEIGHED, BLOCK)
        above += tl.sum(tl.where(key > threshold, mass, 0), 0)
        at = tl.maximum(at, tl.max(tl.where(key == threshold, mass, 0), 0))
    return threshold, above, at


@triton.jit
def _kept_weight(scratch, count, top, lowest, ties, BLOCK: tl.constexpr):
    total = ties * 0
    at = ties * 0
    for n in tl.range(0, count, BLOCK):
        key, mass = _mass(scratch, n, count, top, True, BLOCK)
        total += tl.sum(tl.where(key > lowest, mass, 0), 0)
        at = tl.maximum(at, tl.max(tl.where(key == lowest, mass, 0), 0))
    return total + ties * at


@triton.jit
def _list(logits, temperature, lowest, ties, out, size, BLOCK: tl.constexpr):
    """Store the kept ids in order; returns how many."""
    e = tl.arange(0, BLOCK)
    found = size * 0
    tied = size * 0
    for n in tl.range(0, size, BLOCK):
        z = _tempered(logits, n + e, n + e < size, temperature)
        key = _ordered(z)
        inside = z > float("-inf")
        equal = (inside & (key == lowest)).to(tl.int32)
        keep = inside & ((key > lowest) | ((equal > 0) & (tied + tl.cumsum(equal, 0) <= ties)))
        place = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(out + place, n + e, mask=keep)
        found += tl.sum(keep.to(tl.int32), 0)
        tied += tl.sum(equal, 0)
    return found


@triton.jit
def _listed(logits, temperature, top, ids, n, count, BLOCK: tl.constexpr):
    e = n + tl.arange(0, BLOCK)
    token = tl.load(ids + e, mask=e < count, other=0)
    return tl.where(e < count, weigh(_tempered(logits, token, e < count, temperature), top), 0)


@triton.jit
def threshold(draw, total):
    """The weight that the cumulative sum has to pass."""
    return tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _draw_listed(logits, temperature, top, ids, count, draw, BLOCK: tl.constexpr):
    """The token drawn from the listed ids, and their weight."""
    total = (count * 0).to(tl.int64)
    for n in tl.range(0, count, BLOCK):
        total += tl.sum(_listed(logits, temperature, top, ids, n, count, BLOCK), 0)
    limit = threshold(draw, total)
    before = total * 0
    place = count * 0
    for n in tl.range(0, count, BLOCK):
        mass = _listed(logits, temperature, top, ids, n, count, BLOCK)
        passed = (before + tl.cumsum(mass, 0) <= limit) & (n + tl.arange(0, BLOCK) < count)
        place += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(mass, 0)
    return tl.load(ids + tl.maximum(tl.minimum(place, count - 1), 0)), total


@triton.jit
def _draw_any(logits, temperature, top, mass, total, draw, size, BLOCK: tl.constexpr):
    """The token drawn from the whole row, whose chunks weigh `mass`."""
    limit = threshold(draw, total)
    cumulative = tl.cumsum(mass, 0)
    chunk = tl.sum((cumulative <= limit).to(tl.int32), 0)
    before = tl.sum(tl.where(cumulative <= limit, mass, 0), 0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    within = weigh(_tempered(logits, ids, ids < size, temperature), top)
    passed = (before + tl.cumsum(within, 0) <= limit).to(tl.int32)
    return tl.minimum(chunk * BLOCK + tl.sum(passed, 0), size - 1)


@triton.jit
def _best(
    logits, temperature, top, tops, size, CHUNKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    c = tl.arange(0, PADDED)
    chunk = tl.min(tl.where(tl.load(tops + c, mask=c < CHUNKS, other=float("-inf")) == top, c, CHUNKS - 1), 0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    z = _tempered(logits, ids, ids < size, temperature)
    return tl.min(tl.where(z == top, ids, size - 1), 0)


@triton.jit
def _limits(logits, counts, sums, row, temperature, top, top_k, top_p, scratch, size, BLOCK: tl.constexpr):
    """The lowest key that is kept, and how many of those that have it (lowest ids first)."""
    lowest = (size * 0).to(tl.uint32)
    ties = (size * 0).to(tl.int64)
    wanted = size * 0 + _BUCKETS
    weight = ties * 0
    if top_k < size:
        bucket, before = _end(counts, row, top_k)
        found = _collect(logits, temperature, top, bucket, scratch, size, lowest, ties, BLOCK)
        tl.debug_barrier()
        # Fewer than k ids may be above -inf.
        key, above, _ = _search(scratch, found, top, tl.minimum(top_k - before, found), False, BLOCK)
        lowest = key
        ties = tl.minimum(top_k - before, found) - above
        wanted = bucket
        if top_p < 1.0:
            b = tl.arange(0, _BUCKETS)
            values = tl.load(sums + row * _BUCKETS + b)
            weight = tl.sum(tl.where(b < bucket, values, 0), 0)
            weight += _kept_weight(scratch, found, top, lowest, ties, BLOCK)
        tl.debug_barrier()
    elif top_p < 1.0:
        b = tl.arange(0, _BUCKETS)
        weight = tl.sum(tl.load(sums + row * _BUCKETS + b), 0)
    if top_p < 1.0:
        limit = tl.maximum(tl.ceil(top_p * weight.to(tl.float64)).to(tl.int64), 1)
        bucket, before = _end(sums, row, limit)
        floor = tl.where(bucket == wanted, lowest, 0).to(tl.uint32)
        found = _collect(logits, temperature, top, bucket, scratch, size, floor, ties, BLOCK)
        tl.debug_barrier()
        key, above, at = _search(scratch, found, top, limit - before, True, BLOCK)
        needed = (limit - before - above + at - 1) // tl.maximum(at, 1)
        same = (bucket == wanted) & (key == lowest)
        ties = tl.where(same, tl.minimum(needed, ties), needed)
        lowest = key
        tl.debug_barrier()
    return lowest, ties


@triton.jit
def _choose(
    logits,
    rules,
    tops,
    masses,
    counts,
    sums,
    ids,
    out,
    rows,
    size,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    TRUNCATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    temperature, greedy, top_k, top_p = _rule(rules, rows, row, size)
    top = largest(tops, row, CHUNKS, PADDED)
    draw = uniform(tl.load(rules + 3 * rows + row), tl.load(rules + 4 * rows + row))
    c = tl.arange(0, PADDED)
    mass = tl.load(masses + row * CHUNKS + c, mask=c < CHUNKS, other=0)
    total = tl.sum(mass, 0)
    kept = total
    listed = size * 0
    finite = top == top
    token = size * 0
    truncated = ((top_k < size) | (top_p < 1.0)) & finite
    if TRUNCATE and truncated:
        lowest, ties = _limits(
            logits, counts, sums, row, temperature, top, top_k, top_p, ids + row * size, size, BLOCK
        )
        listed = _list(logits, temperature, lowest, ties, ids + row * size, size, BLOCK)
        tl.debug_barrier()
        token, kept = _draw_listed(logits, temperature, top, ids + row * size, listed, draw, BLOCK)
    elif finite:
        if greedy:
            token = _best(logits, temperature, top, tops + row * CHUNKS, size, CHUNKS, PADDED, BLOCK)
        else:
            token = _draw_any(logits, temperature, top, mass, total, draw, size, BLOCK)
    z = _tempered(logits, token, token < size, temperature)
    gap = z.to(tl.float64) - top.to(tl.float64)
    own = (gap - tl.log(kept.to(tl.float64) / _ONE)).to(tl.float32)
    full = (gap - tl.log(total.to(tl.float64) / _ONE)).to(tl.float32)
    own = tl.where(finite, own, float("nan"))
    full = tl.where(finite, full, float("nan"))
    tl.store(out + row, token)
    tl.store(out + rows + row, listed)
    tl.store(out + 2 * rows + row, own.to(tl.int32, bitcast=True))
    tl.store(out + 3 * rows + row, full.to(tl.int32, bitcast=True))


def packed(rules: Rules, device: torch.device) -> Tensor:
    """The rules as int64 [5, B] on `device`, floats by their bits: one copy."""
    floats = (rules.temperature.view(torch.int64), rules.top_p.view(torch.int64))
    joint = torch.stack((*floats, rules.top_k, rules.seed, rules.position))
    return (joint.pin_memory() if device.type == "cuda" else joint).to(device, non_blocking=True)


def plain_rules(rows: int, device: torch.device) -> Tensor:
    """Rules of rows that are neither tempered nor truncated, as `packed` gives them."""
    rules = torch.zeros((5, rows), dtype=torch.int64, device=device)
    rules[:2] = 0x3FF0000000000000  # 1.0
    return rules


def tops_and_masses(logits: Tensor, rules: Tensor) -> tuple[Tensor, Tensor]:
    """Of each chunk [B, chunks] of rows that nothing truncates: the largest logit, and the sum of weights."""
    rows, size = logits.shape
    chunks = triton.cdiv(size, CHUNK)
    tops = logits.new_empty((rows, chunks))
    masses = logits.new_empty((rows, chunks), dtype=torch.int64)
    at = (rows, size, logits.stride(0))
    shape = {"CHUNKS": chunks, "BLOCK": CHUNK, "num_warps": 8}
    _tops[(chunks, rows)](logits, rules, tops, *at, **shape)
    shape |= {"PADDED": triton.next_power_of_2(chunks), "TRUNCATE": False}
    _masses[(chunks, rows)](logits, rules, tops, masses, masses, masses, *at, **shape)
    return tops, masses


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `model.ops.sampling.draw`."""
    rules = plain_rules(len(logits), logits.device)
    rules[3:] = torch.stack([seeds, positions]).to(logits.device, non_blocking=True)
    return launch(logits.contiguous(), rules, False)[0][0].long()


def launch(logits: Tensor, rules: Tensor, truncate: bool) -> tuple[Tensor, Tensor | None]:
    """Tokens, counts of ids and both log-probabilities as int32 bits [4, B], and the ids [B, V] int32."""
    rows, size = logits.shape
    assert size <= 2**18, f"weights have 44 bits: {size} ids are too many"
    assert logits.stride(1) == 1, "logits must be contiguous along the row"
    chunks = triton.cdiv(size, CHUNK)
    tops = logits.new_empty((rows, chunks))
    masses = logits.new_empty((rows, chunks), dtype=torch.int64)
    counts, sums, ids = masses, masses, masses
    if truncate:
        counts = logits.new_zeros((rows, _BUCKETS.value), dtype=torch.int32)
        sums = logits.new_zeros((rows, _BUCKETS.value), dtype=torch.int64)
        ids = logits.new_empty((rows, size), dtype=torch.int32)
    out = logits.new_empty((4, rows), dtype=torch.int32)
    grid, padded = (chunks, rows), triton.next_power_of_2(chunks)
    at = (rows, size, logits.stride(0))
    shape = {"CHUNKS": chunks, "BLOCK": CHUNK, "num_warps": 8}
    _tops[grid](logits, rules, tops, *at, **shape)
    shape |= {"PADDED": padded, "TRUNCATE": truncate}
    _masses[grid](logits, rules, tops, masses, counts, sums, *at, **shape)
    _choose[(rows,)](logits, rules, tops, masses, counts, sums, ids, out, *at, **shape)
    return out, ids if truncate else None


def sampling(logits: Tensor, rules: Rules) -> Drawn:
    """See `model.ops.sampling.sampling`."""
    rows, size = logits.shape
    if not rows:
        return Drawn(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0))
    truncate = bool(rules.truncating(size).any())
    out, ids = launch(logits, packed(rules, logits.device), truncate)
    tokens, counts, own, full = out.cpu()
    own, full = own.view(torch.float32), full.view(torch.float32)
    if ids is None:
        return Drawn(tokens.long(), own, full)
    counts = torch.where(counts == size, 0, counts.long())
    most = int(counts.max())
    listed = ids[:, :most].cpu()[torch.arange(most) < counts[:, None]]
    return Drawn(tokens.long(), own, full, counts, listed.long())
