"""Gradients of routing, of the activation, and of the way of tokens to their experts and back."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.experts import route_gradients, triton
from model.ops.experts.plan import Plan


class Route(torch.autograd.Function):
    """See `model.ops.experts.route`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        options: tuple[int, float, float],
        forced: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Affinity, ids and weights."""
        affinity, ids, weights = triton.route(x, weight, bias, *options, forced)
        ctx.save_for_backward(x, weight, affinity, ids)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids)
        return affinity, ids, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Through the weights' normalisation and sqrt(softplus) to tokens and router."""
        x, weight, affinity, ids = ctx.saved_tensors
        _, factor, temperature = ctx.options
        parts = route_gradients.logit_gradients(
            affinity, ids, grads[0], grads[2], factor=factor, temperature=temperature
        )
        return *route_gradients.route_gradients(parts, x, weight), None, None, None


class Spread(torch.autograd.Function):
    """Tokens [T, d] to rows [n, d] by expert; the gradient sums a token's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        """Copy."""
        ctx.plan = plan
        return x.index_select(0, plan.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Sum."""
        return triton.combine(grads[0].contiguous(), ctx.plan), None


class Combine(torch.autograd.Function):
    """The reverse of `Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Plan) -> Tensor:
        """Sum."""
        ctx.plan = plan
        return triton.combine(rows, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Copy."""
        return grads[0].index_select(0, ctx.plan.tokens), None


class SwiGLU(torch.autograd.Function):
    """See `model.ops.experts.swiglu`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, plan: Plan, limit: float) -> Tensor:
        """Activation times weight."""
        ctx.save_for_backward(hidden, weights)
        ctx.plan, ctx.limit = plan, limit
        return triton.swiglu(hidden, weights, plan, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden rows and weights."""
        hidden, weights = ctx.saved_tensors
        return (
            *triton.swiglu_backward(hidden, weights, ctx.plan, ctx.limit, grads[0].contiguous()),
            None,
            None,
        )
