"""A mixture of experts as five steps: route, plan, spread and multiply, activate, combine.

Shared experts are groups that get every token, so that routed and shared ones are one grouped product.
"""

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.experts import reference
from model.ops.experts.plan import Plan

__all__ = ["Plan", "combine", "few_rows", "grouped", "plan_of", "route", "spread", "swiglu"]


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    chosen: int,
    factor: float,
    temperature: float = 1.0,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Affinities sqrt(softplus(x . w / temperature)), and the best `chosen` experts under `bias`.

    Args:
        x: [T, d] bf16.
        weight: [E, d].
        bias: [E] fp32, for the choice alone.
        chosen: experts a token goes to; ties go to the lower expert.
        factor: what a token's weights sum to.
        temperature: divides the logits.
        forced: [T, chosen] experts to go to, negative where the router chooses.

    Returns:
        Affinity [T, E] fp32, ids [T, chosen] int64, weights [T, chosen] fp32.
    """
    if use_kernel("route", x):
        from model.ops.experts.autograd import Route

        return Route.apply(x.contiguous(), weight, bias, (chosen, factor, temperature), forced)  # pyright: ignore
    return reference.route(x, weight, bias, chosen, factor, temperature, forced)


def plan_of(ids: Tensor, experts: int, shared: int) -> Plan:
    """Group tokens by the experts `ids` [T, k] of `experts`, and by `shared` ones that get all of them."""
    if use_kernel("plan_of", ids):
        from model.ops.experts import triton

        return triton.plan(ids, experts, shared)
    return reference.plan(ids, experts, shared)


def spread(x: Tensor, plan: Plan) -> Tensor:
    """Tokens [T, d] to rows [n, d] in the order of `plan`."""
    if use_kernel("spread", x) and torch.is_grad_enabled() and x.requires_grad:
        from model.ops.experts.autograd import Spread

        return Spread.apply(x, plan)  # pyright: ignore[reportReturnType]
    return x.index_select(0, plan.tokens)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [n, K] of each group times its matrix of `weight` [G, N, K]: [n, N]. Sums in fp32."""
    if use_kernel("grouped", x):
        # A row's bits do not depend on how many rows its group has: measured, and part of exact mode.
        return torch._grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
            x, weight.transpose(1, 2), offs=ends
        )
    return reference.grouped(x, weight, ends)


def swiglu(hidden: Tensor, weights: Tensor, plan: Plan, *, limit: float) -> Tensor:
    """Rows [n, 2 f] to [n, f]: weight * silu(min(gate, limit)) * clip(up, -limit, limit).

    `weights` [T, k] fp32 are those of the routed experts; shared ones weigh 1.
    """
    if use_kernel("swiglu", hidden):
        from model.ops.experts.autograd import SwiGLU

        return SwiGLU.apply(hidden, weights, plan, limit)  # pyright: ignore[reportReturnType]
    return reference.swiglu(hidden, weights, plan, limit)


def combine(rows: Tensor, plan: Plan) -> Tensor:
    """Sum of each token's rows [n, d] in fp32, in the order of its choice: [T, d]."""
    if use_kernel("combine", rows):
        from model.ops.experts.autograd import Combine

        return Combine.apply(rows, plan)  # pyright: ignore[reportReturnType]
    return reference.combine(rows, plan)


def few_rows(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, plan: Plan, *, limit: float
) -> Tensor | None:
    """What `combine` sums, [n, d], for few tokens without gradient; None where the separate steps are better.

    One kernel gathers, multiplies and activates, another multiplies back: a decode step waits for launches.
    """
    if torch.is_grad_enabled() or not use_kernel("few_rows", x):
        return None
    from model.ops.experts import triton

    if not triton.few_fits(x, w13, w2, len(plan.tokens)):
        return None
    return triton.few(x.contiguous(), w13, w2, weights, plan, limit)
