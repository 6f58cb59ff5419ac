"""A mixture of experts as five steps: route, plan, multiply, activate, combine.

Shared experts are groups that get every token, so that routed and shared ones are one grouped product.
"""

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.experts import reference
from model.ops.experts.plan import Plan, block_loads

__all__ = ["Plan", "activated", "combine", "few_rows", "grouped", "plan_of", "route", "swiglu"]


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    chosen: int,
    factor: float,
    temperature: float = 1.0,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
        Affinity [T, E] fp32, ids [T, chosen] int64, weights [T, chosen] fp32, and how many tokens of each
        block of `BLOCK_TOKENS` chose an expert, [blocks, E] int32.
    """
    if use_kernel("route", x):
        from model.ops.experts.autograd import Route

        return Route.apply(x.contiguous(), weight, bias, (chosen, factor, temperature), forced)  # pyright: ignore
    return reference.route(x, weight, bias, chosen, factor, temperature, forced)


def plan_of(ids: Tensor, experts: int, shared: int, loads: Tensor | None = None) -> Plan:
    """Group tokens by the experts `ids` [T, k] of `experts`, and by `shared` ones that get all of them.

    `loads` [blocks, E] are those of `route`; without them they are counted.
    """
    if use_kernel("plan_of", ids):
        from model.ops.experts import triton

        return triton.plan(ids, block_loads(ids, experts) if loads is None else loads, shared)
    return reference.plan(ids, experts, shared)


def grouped(x: Tensor, weight: Tensor, plan: Plan, *, of_tokens: bool = False) -> Tensor:
    """Each expert's rows times its matrix of `weight` [G, N, K]: [n, N]. Sums in fp32.

    `x` are the rows [n, K], or with `of_tokens` the tokens [T, K] of which each goes to several experts.
    """
    if use_kernel("grouped", x):
        from model.ops.experts.autograd import Grouped

        return Grouped.apply(x.contiguous(), weight, plan, of_tokens)  # pyright: ignore[reportReturnType]
    return reference.grouped(x, weight, plan, of_tokens)


def activated(x: Tensor, w13: Tensor, weights: Tensor, plan: Plan, *, limit: float) -> Tensor:
    """Tokens [T, d] through gates and ups `w13` [G, 2 f, d] of their experts, activated, weighted: [n, f].

    The same bits as `swiglu` of `grouped`; without a gradient one kernel does both.
    """
    if use_kernel("activated", x) and not torch.is_grad_enabled():
        from model.ops.experts import product

        return product.activated(x.contiguous(), w13, weights, plan, limit)
    return swiglu(grouped(x, w13, plan, of_tokens=True), weights, plan, limit=limit)


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

    The same bits as `grouped` of `activated`, from kernels that read each matrix once.
    """
    if torch.is_grad_enabled() or not use_kernel("few_rows", x):
        return None
    from model.ops.experts import product

    if not product.few_fits(x, w2, len(plan.tokens)):
        return None
    return product.few(x.contiguous(), w13, w2, weights, plan, limit)
