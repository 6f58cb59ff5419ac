"""Definition of experts in FP4: decode a matrix, multiply, activate, multiply back."""

from itertools import pairwise

import torch
from torch import Tensor

from model.ops.experts import reference as experts
from model.ops.experts.plan import Plan
from model.ops.packed_experts.stack import Stack
from model.quant.blocks import round_activation


def packed_experts(
    x: Tensor, w13: Stack, w2: Stack, weights: Tensor, plan: Plan, *, limit: float, rounded: bool
) -> Tensor:
    """See `model.ops.packed_experts.packed_experts`."""
    rows = x[plan.tokens.long()]
    hidden = _grouped(round_activation(rows) if rounded else rows, w13, plan)
    active = experts.swiglu(hidden, weights, plan, limit)
    return _grouped(round_activation(active) if rounded else active, w2, plan)


def _grouped(x: Tensor, stack: Stack, plan: Plan) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    bounds = [0, *plan.ends.tolist()]
    parts = [
        x[a:b].to(wide) @ stack.matrix(expert, wide).T
        for expert, (a, b) in enumerate(pairwise(bounds))
        if b > a
    ]
    return torch.cat(parts).to(x.dtype)
