"""What the products of experts do to gates and ups before they store them, in registers."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

from model.ops.tile import round_bf16


@triton.jit
def activate(gate, up, limit):
    """silu(min(gate, limit)) * clip(up) of products in fp32, rounded to bf16 first as if they were stored."""
    g = tl.minimum(round_bf16(gate).to(tl.float32), limit)
    u = tl.minimum(tl.maximum(round_bf16(up).to(tl.float32), -limit), limit)
    return g / (1.0 + tl.exp(-g)) * u


@triton.jit
def weights_of(row, token, inside, place, weights, K: tl.constexpr, KS: tl.constexpr):
    """Weight of each row of a token: of the choice by which it came here, 1 for shared experts."""
    scale = (row * 0 + 1).to(tl.float32)
    for j in tl.static_range(K):
        here = tl.load(place + token * KS + j, mask=inside, other=-1) == row
        scale = tl.where(here, tl.load(weights + token * K + j, mask=inside, other=0.0), scale)
    return scale
