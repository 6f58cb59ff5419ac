"""Many rows through packed experts: some matrices at a time unpacked to bf16, and a grouped product of them.

Products are then as fast as those of unpacked experts; the copy is written and read once for all tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.experts import grouped, swiglu
from model.ops.experts.plan import Plan, row_tiles
from model.ops.packed_experts.stack import Stack
from model.ops.packed_experts.triton import unpack
from model.quant.blocks import round_activation

TOKENS = 4096
"""From so many tokens on this is faster than decoding in registers."""
_AT_ONCE = 32
"""Matrices: 1.5 GB of them at the released widths."""


def packed_experts(
    x: Tensor, w13: Stack, w2: Stack, weights: Tensor, plan: Plan, *, limit: float, rounded: bool
) -> Tensor:
    """See `model.ops.packed_experts.packed_experts`."""
    bounds = [0, *plan.ends.tolist()]
    rows = (round_activation(x) if rounded else x).index_select(0, plan.tokens)
    active = swiglu(_product(rows, w13, plan, bounds), weights, plan, limit=limit)
    return _product(round_activation(active) if rounded else active, w2, plan, bounds)


def _product(x: Tensor, stack: Stack, plan: Plan, bounds: list[int]) -> Tensor:
    groups, columns, _ = stack.shape
    routed = len(stack.codes)
    out = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    for first in range(0, routed, _AT_ONCE):
        last = min(first + _AT_ONCE, routed)
        begin, end = bounds[first], bounds[last]
        if begin < end:
            matrices = unpack(stack.codes[first:last], stack.scales[first:last])
            ends = plan.ends[first:last] - begin
            part = Plan(plan.tokens[begin:end], plan.place, ends, row_tiles(ends, end - begin))
            out[begin:end] = grouped(x[begin:end], matrices, part)
    for group in range(routed, groups):
        rows = slice(bounds[group], bounds[group + 1])
        out[rows] = F.linear(x[rows], stack.plain[group - routed])
    return out
