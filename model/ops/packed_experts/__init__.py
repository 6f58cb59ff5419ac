"""Experts whose routed matrices stay in FP4: read as they are stored and decoded in registers.

A decode step reads every matrix of the experts in use once and does little with it, so that bytes are its
time: FP4 with a scale byte per 32 is 0.53 byte a weight. For inference; there is no backward pass.
"""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.experts.plan import Plan
from model.ops.packed_experts import reference
from model.ops.packed_experts.stack import LARGEST_SCALE, Stack

__all__ = ["LARGEST_SCALE", "Stack", "packed_experts"]


def packed_experts(
    x: Tensor,
    w13: Stack,
    w2: Stack,
    weights: Tensor,
    plan: Plan,
    *,
    limit: float,
    rounded: bool = False,
    exact: bool = False,
) -> Tensor:
    """What `model.ops.experts.combine` sums: each token through each of its experts.

    Args:
        x: [T, d].
        w13: gate and up rows, [E + S, 2 f, d].
        w2: [E + S, d, f].
        weights: [T, k] fp32 of the routed experts; shared ones weigh 1.
        plan: how rows are grouped by expert (`model.ops.experts.plan_of`).
        limit: clips gate and up.
        rounded: round the inputs of both products to FP8 with a scale per 32, as the published policy does.
        exact: one tiling for every number of tokens, so that a token's bits do not depend on the others.

    Returns:
        [n, d] in the dtype of `x`, in the order of `plan`. Products sum in fp32.

    Raises:
        ValueError: shapes or types do not belong together.
    """
    w13.check()
    w2.check()
    (groups, twice, width), second = w13.shape, w2.shape
    if x.shape[1] != width or second != (groups, width, twice // 2) or len(plan.ends) != groups:
        raise ValueError(
            f"tokens {tuple(x.shape)}, matrices {w13.shape} and {second} and a plan of {len(plan.ends)} "
            "groups do not belong together"
        )
    if use_kernel("packed_experts", x):
        from model.ops.packed_experts import chunks, triton

        narrow = width % triton.WIDTHS != 0 or second[2] % triton.WIDTHS != 0
        if narrow or (len(x) >= chunks.TOKENS and not exact):
            options = {"limit": limit, "rounded": rounded, "at_once": None if narrow else chunks.AT_ONCE}
            return chunks.packed_experts(x, w13, w2, weights, plan, **options)
        return triton.packed_experts(x, w13, w2, weights, plan, limit=limit, rounded=rounded, exact=exact)
    return reference.packed_experts(x, w13, w2, weights, plan, limit=limit, rounded=rounded)
