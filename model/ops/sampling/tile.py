"""Device helpers of sampling: rules, weights, the order of logits, and what a truncated row keeps."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from model.ops.sampling.reference import WEIGHT_BITS
from model.ops.tile import INTERPRET, LN2, LOG2E

CHUNK = 4096
RANGES = tl.constexpr(32)
"""Ranges of logits in which a truncated row's ids are counted: see `distance`; the last takes the rest."""
ONE = tl.constexpr(float(2**WEIGHT_BITS))
_INTEGERS = tl.constexpr(float(2**52))
_SHIFT = tl.constexpr(1.5 * 2**52 + WEIGHT_BITS)
_NOTHING = tl.constexpr(WEIGHT_BITS * 1.0)  # exp(-44) weighs 2^-19


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
    """Logits of some ids over the temperature, -inf outside; -0 becomes 0."""
    return quotient(tl.load(logits + ids, mask=inside, other=float("-inf")), temperature)


@triton.jit
def quotient(z, temperature):
    """Logits over the temperature, rounded as a division rounds; -0 becomes 0."""
    near = finite_quotient(z, temperature)
    z = tl.where(tl.abs(z) < float("inf"), near, z)
    return tl.where(z == 0.0, 0.0, z)


@triton.jit
def finite_quotient(z, temperature):
    """The same of finite logits; of infinite ones it may be NaN.

    One correction of z times the rounded reciprocal rounds as a division does (Markstein 1990) while nothing
    leaves the range of normal numbers, in a quarter of its instructions.
    """
    if INTERPRET:
        z = tl.div_rn(z, temperature)
    else:
        reciprocal = tl.div_rn(1.0, temperature)
        near = z * reciprocal
        z = tl.fma(tl.fma(-near, temperature, z), reciprocal, near)
    return z


@triton.jit
def _wide(value: tl.constexpr):
    """An fp64 constant: `tl.fma` would take a number in fp32."""
    return tl.full((), value, tl.float64)


@triton.jit
def weigh(z, top):
    """Integer weights of logits, given the largest of their row: see `reference.weights`.

    NaN weighs nothing, and so does all of a row whose largest is NaN. The exponential is within 2^-50 of
    itself; the same logits get the same weights in every kernel.
    """
    gap = tl.maximum(z, top - _NOTHING).to(tl.float64) - top.to(tl.float64)
    # exp(gap) = 2^n exp(rest): adding 1.5 * 2^52 leaves n, and WEIGHT_BITS, in the lowest bits.
    shifted = tl.fma(gap, _wide(LOG2E), _wide(_SHIFT))
    rest = tl.fma(shifted - _SHIFT, _wide(-LN2), gap)
    power = tl.fma(rest, _wide(2.7620075892548164e-07), _wide(2.763264069051338e-06))
    power = tl.fma(power, rest, _wide(2.480152132234228e-05))
    power = tl.fma(power, rest, _wide(0.00019841190647512536))
    power = tl.fma(power, rest, _wide(0.0013888888917196736))
    power = tl.fma(power, rest, _wide(0.008333333367311624))
    power = tl.fma(power, rest, _wide(0.041666666666624164))
    power = tl.fma(power, rest, _wide(0.16666666666615648))
    power = tl.fma(power, rest, _wide(0.5000000000000001))
    power = tl.fma(power, rest, _wide(1.0))
    power = tl.fma(power, rest, _wide(1.0))
    bits = power.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    # Adding 2^52 rounds to an integer, which stands in the lowest bits.
    whole = (bits.to(tl.float64, bitcast=True) + _INTEGERS).to(tl.int64, bitcast=True)
    return whole & tl.where(top == top, 0xFFFFFFFFFFFFF, 0)


@triton.jit
def distance(z, top):
    """How many ranges a logit lies below the largest, RANGES at most.

    Ranges are half a unit wide down to 12, where most rows end, and 2 from there, down to 26.
    """
    gap = top - z
    return tl.minimum(tl.minimum(gap * 2.0, gap * 0.5 + 18.0), RANGES * 1.0)


@triton.jit
def begin_of(b):
    """How far below the largest logit a range begins."""
    return tl.maximum(b * 0.5, b * 2.0 - 36.0)


@triton.jit
def ordered(z):
    """fp32 -> uint32 in the same order."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def number(key):
    """The fp32 of an order: the reverse of `ordered`, of a key in int64."""
    bits = tl.where(key >= 0x80000000, key - 0x80000000, 0xFFFFFFFF - key)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def largest(tops, row, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """The largest logit of a row, NaN where the row is not finite."""
    c = tl.arange(0, PADDED)
    top = tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    broken = tl.max((top != top).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(top == top, top, float("-inf")), 0)
    return tl.where(broken | (highest - highest != 0.0), float("nan"), highest)


@triton.jit
def chosen_chunk(mass, limit):
    """The chunk, of those that weigh `mass`, in which the sum passes `limit`, and what is before it."""
    cumulative = tl.cumsum(mass, 0)
    chunk = tl.sum((cumulative <= limit).to(tl.int32), 0)
    return chunk, tl.sum(tl.where(cumulative <= limit, mass, 0), 0)


@triton.jit
def threshold(draw, total):
    """The weight that the cumulative sum has to pass."""
    return tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)
