"""Device helpers that several kernels share: operands, dots, coders of packed keys, and rotations.

Under `TRITON_INTERPRET=1` the interpreter multiplies the bit patterns of bf16 operands, truncates fp32 to
bf16 and has no inline assembly. There these helpers work in fp32 with software rounding and give the same
values.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
# Launch option of kernels that must give the bits of other kernels. Of `a * b + c * d` the compiler may fuse
# either product with the addition, and does not choose the same one everywhere: `tl.fma` says which.
UNFUSED = {"enable_fp_fusion": False}
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MASKED = tl.constexpr(-1e30)
# FP4 keys are decoded as value * 2**-8, exactly; the softmax scale and the output carry the factor 2**8.
KEY_SCALE = tl.constexpr(256.0)

# Four bytes to four words of two bf16, and to two words.
E2M1_ASM = tl.constexpr(
    """{
.reg .b32 t0, t1, x, y;
prmt.b32 t0, $4, 0, 0x4140; prmt.b32 t1, $4, 0, 0x4342;
shl.b32 x, t0, 6; and.b32 x, x, 0x01C001C0;
shl.b32 y, t0, 12; and.b32 y, y, 0x80008000; or.b32 $0, x, y;
shl.b32 x, t1, 6; and.b32 x, x, 0x01C001C0;
shl.b32 y, t1, 12; and.b32 y, y, 0x80008000; or.b32 $1, x, y;
shl.b32 x, t0, 2; and.b32 x, x, 0x01C001C0;
shl.b32 y, t0, 8; and.b32 y, y, 0x80008000; or.b32 $2, x, y;
shl.b32 x, t1, 2; and.b32 x, x, 0x01C001C0;
shl.b32 y, t1, 8; and.b32 y, y, 0x80008000; or.b32 $3, x, y;
}"""
)
E4M3_ASM = tl.constexpr(
    """{
.reg .b32 t0, t1, x, y;
prmt.b32 t0, $2, 0, 0x4140; prmt.b32 t1, $2, 0, 0x4342;
shl.b32 x, t0, 4; and.b32 x, x, 0x07F007F0;
shl.b32 y, t0, 8; and.b32 y, y, 0x80008000; or.b32 $0, x, y;
shl.b32 x, t1, 4; and.b32 x, x, 0x07F007F0;
shl.b32 y, t1, 8; and.b32 y, y, 0x80008000; or.b32 $1, x, y;
}"""
)


def _half_words(select: str, first: int) -> str:
    """Four values of two words: equal halves side by side, of which each value takes one bit pattern."""
    return f"""prmt.b32 t, $8, $9, {select};
and.b32 ${first}, t, 0x81C081C0;
shl.b32 x, t, 3; and.b32 ${first + 1}, x, 0x81C081C0;
shl.b32 x, t, 6; and.b32 ${first + 2}, x, 0x81C081C0;
shl.b32 x, t, 1; and.b32 x, x, 0x80008000;
shr.b32 y, t, 5; and.b32 y, y, 0x01000100; or.b32 x, x, y;
shr.b32 y, t, 4; and.b32 y, y, 0x00C000C0; or.b32 ${first + 3}, x, y;
"""


# Two words to eight words of two bf16.
E2M1_WORDS_ASM = tl.constexpr(
    "{\n.reg .b32 t, x, y;\n" + _half_words("0x5410", 0) + _half_words("0x7632", 4) + "}"
)

# Any value that Triton does not specialise (not 1, not a multiple of 16); see `branched_dot`.
LAYOUT_FLAG = 7


@triton.jit
def operand(x):
    """A tile as the tensor cores take it (fp32 in the interpreter)."""
    if INTERPRET:  # noqa: SIM108
        y = x.to(tl.float32)
    else:
        y = x
    return y


@triton.jit
def round_bf16(x):
    """Round fp32 to bf16, to nearest even (kept in fp32 in the interpreter)."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        y = bits.to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.bfloat16)
    return y


@triton.jit
def branched_dot(a, b, flag):
    """`tl.dot(a, b)` in a branch that is always taken, which keeps Triton from duplicating the product.

    For a dot whose result feeds another dot Triton puts all warps along the rows; with 64 rows and two
    warpgroups both then compute the same scores. A branch on a run-time value breaks the chain it looks for.
    """
    if flag > 0:  # noqa: SIM108
        s = tl.dot(a, b)
    else:
        s = tl.dot(a, b) * 2.0
    return s


@triton.jit
def branched_dot2(a, b, c, d, flag):
    """`a @ b + c @ d` with the branch of `branched_dot`."""
    if flag > 0:
        s = tl.dot(a, b)
        s = tl.dot(c, d, s)
    else:
        s = tl.dot(a, b) * 2.0
        s = tl.dot(c, d, s)
    return s


@triton.jit
def sum_of_heads(products, weights, KEYS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Index scores [KEYS, QUERIES] of products [KEYS, QUERIES * HEADS]: sum of weight times what is positive.

    `weights` [QUERIES * HEADS] fp32. What a thread holds of a row of products, pairs of neighbours out of
    every eight, is summed by fused operations one after the other; then come the sums of four threads.
    """
    GROUPS: tl.constexpr = HEADS // 8
    x = tl.reshape(tl.maximum(products, 0.0), (KEYS, QUERIES, GROUPS, 4, 2))
    w = tl.reshape(weights, (1, QUERIES, GROUPS, 4, 2))
    x = tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (KEYS, QUERIES, 4, GROUPS * 2))
    w = tl.reshape(tl.permute(w, (0, 1, 3, 2, 4)), (1, QUERIES, 4, GROUPS * 2))
    return tl.sum(_chained(x, w, 0.0, True, KEYS, QUERIES, GROUPS * 2), 2)


@triton.jit
def _chained(
    x, w, total, FIRST: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, COUNT: tl.constexpr
):
    """`total`, if this is not the first, plus the products along the last axis of COUNT."""
    if COUNT == 1:
        x, w = tl.reshape(x, (KEYS, QUERIES, 4)), tl.reshape(w, (1, QUERIES, 4))
        if FIRST:  # noqa: SIM108
            total = x * w
        else:
            total = tl.fma(x, w, total)
    else:
        even, odd = tl.split(tl.reshape(x, (KEYS, QUERIES, 4, COUNT // 2, 2)))
        w_even, w_odd = tl.split(tl.reshape(w, (1, QUERIES, 4, COUNT // 2, 2)))
        total = _chained(even, w_even, total, FIRST, KEYS, QUERIES, COUNT // 2)
        total = _chained(odd, w_odd, total, False, KEYS, QUERIES, COUNT // 2)
    return total


@triton.jit
def _bf16_bits(bits):
    """Reinterpret 16 bits (uint16) as bf16."""
    if INTERPRET:
        y = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = bits.to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def e2m1_halves(codes):
    """Two E2M1 values a byte -> (low nibble, high nibble), each value * 2**-126 in bf16."""
    if INTERPRET:
        c = codes.to(tl.uint16)
        low = _bf16_bits(((c & 7) << 6) | ((c & 8) << 12))
        high = _bf16_bits(((c & 0x70) << 2) | ((c & 0x80) << 8))
    else:
        low, high = tl.inline_asm_elementwise(
            E2M1_ASM,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def e4m3_bits(codes):
    """E4M3 bytes -> value * 2**-120 in bf16 (NaN codes are not used by the caches)."""
    if INTERPRET:
        c = codes.to(tl.uint16)
        y = _bf16_bits(((c & 0x7F) << 4) | ((c & 0x80) << 8))
    else:
        y = tl.inline_asm_elementwise(
            E4M3_ASM,
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return y


@triton.jit
def constant_bf16(value: tl.constexpr):
    """A bf16 constant; a bare Python float would turn the product into fp32."""
    if INTERPRET:  # noqa: SIM108
        y = tl.cast(value, tl.float32)
    else:
        y = tl.cast(value, tl.bfloat16)
    return y


@triton.jit
def e2m1_scale(codes):
    """Positive E4M3 bytes -> scale * 2**118 in bf16, exact; times `e2m1_halves`: value * 2**-8."""
    tiny = _bf16_bits(codes.to(tl.uint16) << 4)
    return (tiny * constant_bf16(2.0**120)) * constant_bf16(2.0**118)


@triton.jit
def e4m3_scale(codes):
    """UE8M0 bytes in [16, 142] -> scale * 2**112 in bf16; times `e4m3_bits`: value * 2**-8."""
    return _bf16_bits((codes.to(tl.uint16) + 112) << 7)


@triton.jit
def e2m1_words(words):
    """Eight E2M1 values a word (`model.quant.weights.as_words`) -> their bf16 tiles, values * 2**-126."""
    if INTERPRET:
        w = words.to(tl.uint32, bitcast=True)
        n0, n1, n2, n3 = _e2m1_half(w & 0xFFFF)
        n4, n5, n6, n7 = _e2m1_half(w >> 16)
    else:
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            E2M1_WORDS_ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [words],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )  # fmt: skip
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def _e2m1_half(h):
    """The four values of 16 bits."""
    last = ((h << 1) & 0x8000) | ((h >> 5) & 0x0100) | ((h >> 4) & 0x00C0)
    return (
        _bf16_bits((h & 0x81C0).to(tl.uint16)),
        _bf16_bits(((h << 3) & 0x81C0).to(tl.uint16)),
        _bf16_bits(((h << 6) & 0x81C0).to(tl.uint16)),
        _bf16_bits(last.to(tl.uint16)),
    )


@triton.jit
def ue8m0_scale(codes):
    """UE8M0 bytes up to 136 -> scale * 2**118 in bf16; times `e2m1_words` or `e2m1_halves`: value * 2**-8."""
    return _bf16_bits((codes.to(tl.uint16) + 118) << 7)


@triton.jit
def scale_groups(values, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Multiply [ROWS, COLUMNS] by [ROWS, COLUMNS // GROUP], one factor per GROUP neighbouring columns."""
    grouped = tl.reshape(values, (ROWS, COLUMNS // GROUP, GROUP))
    return tl.reshape(grouped * scales[:, :, None], (ROWS, COLUMNS))


@triton.jit
def e2m1_code(x):
    """Nearest E2M1 code of fp32, ties to the even mantissa."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e4m3_code(x):
    """Nearest E4M3 code of fp32, ties to even, saturating at 448."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    raw = size.to(tl.uint32, bitcast=True)
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - (120 << 3)
    small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.uint32)
    return (tl.where(size >= 0.015625, normal, small) | ((bits >> 24) & 0x80)).to(tl.int32)


@triton.jit
def e4m3_value(code):
    """The fp32 value of a positive E4M3 code."""
    normal = ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    return tl.where(code >= 8, normal, code.to(tl.float32) * 0.001953125)


@triton.jit
def ue8m0_code(largest, LEAST: tl.constexpr, RANGE: tl.constexpr):
    """UE8M0 code and fp32 value of the least scale that brings `largest`, but LEAST at least, into RANGE."""
    bits = (tl.maximum(largest, LEAST) * (1.0 / RANGE)).to(tl.int32, bitcast=True)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return code, (code << 23).to(tl.float32, bitcast=True)


@triton.jit
def turned(x, pointer, d, cosine, sine, D: tl.constexpr, R: tl.constexpr):
    """Operands `x` at `pointer`, channels `d` of rows of D, with the last R of D turned in adjacent pairs."""
    here = d >= D - R
    partner = tl.load(pointer + (d ^ 1)[None, :] - d[None, :], mask=here[None, :], other=0.0).to(tl.float32)
    partner = tl.where((d % 2 == 0)[None, :], -partner, partner)
    pair = (d - (D - R)) // 2
    cos = tl.load(cosine + pair, mask=here, other=1.0)[None, :]
    sin = tl.load(sine + pair, mask=here, other=0.0)[None, :]
    y = operand(round_bf16(tl.fma(x.to(tl.float32), cos, partner * sin)))
    return tl.where(here[None, :], y, x)


@triton.jit
def turn_back(rows, cosine, sine, ROWS: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Turn back the last R channels of `rows` [ROWS, 1] of D that this program has just written."""
    tl.debug_barrier()
    j = tl.arange(0, R // 2)
    cos, sin = tl.load(cosine + j)[None, :], tl.load(sine + j)[None, :]
    tail = rows + (D - R) + tl.arange(0, R)[None, :]
    even, odd = tl.split(tl.reshape(tl.load(tail).to(tl.float32), (ROWS, R // 2, 2)))
    turned = tl.join(tl.fma(even, cos, odd * sin), tl.fma(odd, cos, -(even * sin)))
    tl.store(tail, round_bf16(tl.reshape(turned, (ROWS, R))).to(rows.dtype.element_ty))
