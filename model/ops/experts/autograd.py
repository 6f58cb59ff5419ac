"""Gradients of routing, of the activation, and of the way of tokens to their experts and back."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.experts import product, route_gradients, triton
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Affinity, ids, weights and loads."""
        affinity, ids, weights, loads = triton.route(x, weight, bias, *options, forced)
        ctx.save_for_backward(x, weight, affinity, ids)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids, loads)
        return affinity, ids, weights, loads

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


class Grouped(torch.autograd.Function):
    """See `model.ops.experts.grouped`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: Plan, of_tokens: bool) -> Tensor:
        """Product; gathered rows are not kept."""
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.of_tokens = plan, of_tokens
        return product.grouped(x, weight, plan, of_tokens=of_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the matrices."""
        x, weight = ctx.saved_tensors
        plan, grad = ctx.plan, grads[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product.input_gradient(grad, weight, plan)
            if ctx.of_tokens:
                grad_x = triton.combine(grad_x, plan)
        if ctx.needs_input_grad[1]:
            rows = x.index_select(0, plan.tokens) if ctx.of_tokens else x
            grad_weight = product.weight_gradient(grad, rows, plan)
        return grad_x, grad_weight, None, None


class Combine(torch.autograd.Function):
    """See `model.ops.experts.combine`."""

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
