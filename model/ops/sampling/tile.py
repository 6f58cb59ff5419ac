"""Device helpers of sampling: rules, weights, the order of logits, and what a truncated row keeps."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from model.ops.sampling.reference import WEIGHT_BITS

CHUNK = 4096
BUCKETS = tl.constexpr(2048)
ONE = tl.constexpr(float(2**WEIGHT_BITS))
_PER_UNIT = tl.constexpr(64.0)
# Fields of a truncated row's state: the lowest key that is kept, how many of those that have it (lowest ids
# first) and the weight of one; then the range to collect (negative for none), the mass before it and the mass
# at which the kept part ends.
LOWEST, TIES, TIE_MASS, RANGE, BEFORE, TARGET, FIELDS = (tl.constexpr(i) for i in range(7))


@triton.jit
def rule(rules, rows, row, size):
    """Temperature, whether greedy, top-k (`size` for none), top-p (1 for none)."""
    temperature = tl.load(rules + row).to(tl.float64, bitcast=True)
    top_p = tl.load(rules + rows + row).to(tl.float64, bitcast=True)
    top_k = tl.load(rules + 2 * rows + row)
    greedy = temperature == 0.0
    top_k = tl.where((top_k <= 0) | (top_k > size) | greedy, size, top_k)
    temperature = tl.where(greedy, 1.0, temperature).to(tl.float32)
    return temperature, greedy, top_k, tl.where(greedy, 1.0, top_p)


@triton.jit
def tempered(logits, ids, inside, temperature):
    """Logits of some ids, -inf outside; -0 becomes 0."""
    z = tl.load(logits + ids, mask=inside, other=float("-inf"))
    z = tl.div_rn(z, temperature)
    return tl.where(z == 0.0, 0.0, z)


@triton.jit
def weigh(z, top):
    """Integer weights of logits, given the largest of their row: see `reference.weights`."""
    relative = tl.exp(z.to(tl.float64) - top.to(tl.float64))
    return tl.where(relative == relative, relative * ONE + 0.5, 0.0).to(tl.int64)


@triton.jit
def bucket(z, top):
    """Which of the ranges below the largest logit, rising as z falls; the last one takes the rest."""
    return tl.minimum((top - z) * _PER_UNIT, BUCKETS - 1.0).to(tl.int32)


@triton.jit
def ordered(z):
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
def threshold(draw, total):
    """The weight that the cumulative sum has to pass."""
    return tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def keeps(z, lowest, ties, ties_before):
    """Which logits a truncated row keeps, given how many of the lowest key stand before them."""
    key = ordered(z)
    equal = (key == lowest) & (z > float("-inf"))
    rank = ties_before + tl.cumsum(equal.to(tl.int64), 0)
    return (z > float("-inf")) & ((key > lowest) | (equal & (rank <= ties)))
