"""Many rows through packed experts: some matrices at a time unpacked to bf16, and a grouped product of them.

Products are then as fast as those of unpacked experts; the copy is written and read once for all tokens.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.experts import grouped, swiglu
from model.ops.experts.plan import Plan, row_tiles
from model.ops.packed_experts.stack import Stack
from model.ops.packed_experts.triton import unpack
from model.quant.blocks import round_activation

TOKENS = 8192
"""From so many tokens on this is faster than decoding in registers."""
AT_ONCE = 32
"""Matrices: 1.5 GB of them at the released widths."""


def packed_experts(
    x: Tensor,
    w13: Stack,
    w2: Stack,
    weights: Tensor,
    plan: Plan,
    *,
    limit: float,
    rounded: bool,
    at_once: int | None = AT_ONCE,
) -> Tensor:
    """See `model.ops.packed_experts.packed_experts`.

    `at_once` matrices are unpacked for one product; None: all, and no number has to come to the host, which a
    captured graph could not wait for (small policies, whose widths the other kernel does not take).
    """
    if at_once is None:
        multiply = partial(_together, plan=plan)
    else:
        multiply = partial(_in_turn, plan=plan, bounds=[0, *plan.ends.tolist()], at_once=at_once)
    rows = (round_activation(x) if rounded else x).index_select(0, plan.tokens)
    active = swiglu(multiply(rows, w13), weights, plan, limit=limit)
    return multiply(round_activation(active) if rounded else active, w2)


def _together(x: Tensor, stack: Stack, *, plan: Plan) -> Tensor:
    return grouped(x, torch.cat([unpack(stack.codes, stack.scales), stack.plain]), plan)


def _in_turn(x: Tensor, stack: Stack, *, plan: Plan, bounds: list[int], at_once: int) -> Tensor:
    groups, columns, _ = stack.shape
    routed = len(stack.codes)
    out = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    for first in range(0, routed, at_once):
        last = min(first + at_once, routed)
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
