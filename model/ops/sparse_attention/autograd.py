"""Joins the forward and backward kernels of sparse attention for autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.rotary.triton import rotary_, turned_gradient_
from model.ops.sparse_attention import triton
from model.ops.sparse_attention.backward import Saved, backward
from model.ops.sparse_attention.forward import forward
from model.ops.sparse_attention.heads import by_group, group_heads, product
from model.ops.sparse_attention.inverse import InverseIndex

# Of so many tokens a pass keeps the attention's probabilities for the backward, 80 KiB a token and layer.
_KEPT_TOKENS = 16384


def _forward(
    ctx: Any,
    query: Tensor,
    entries: Tensor,
    indices: Tensor,
    window: Tensor,
    first: Tensor,
    last: Tensor,
    sink: Tensor,
    options: tuple[float, int, InverseIndex | None, bool],
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Run the kernel over one table of entries and window rows: output, log-sum-exp, and what to save."""
    scale, window_size, inverse, exact = options
    table = torch.cat([entries, window])
    indices = indices.contiguous()
    keys = triton.joint_rows(
        indices, first, last, entries=len(entries), window_size=window_size, width=query.shape[2]
    )
    keep = ctx.needs_input_grad[0] and len(query) <= _KEPT_TOKENS
    out, lse, kept = forward(query, table, keys, sink, scale=scale, exact=exact, keep=keep)
    ctx.scale, ctx.window_size, ctx.inverse = scale, window_size, inverse
    ctx.entries, ctx.main, ctx.block = len(entries), keys.main, keys.block
    ctx.mark_non_differentiable(lse)
    saved = query, table, indices, keys.rows, keys.counts, sink, out, lse
    return out, lse, saved if kept is None else (*saved, kept.weights, kept.tops)


def _backward(
    ctx: Any, saved: Sequence[Tensor], grad_out: Tensor, lost: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, entries, window and sink; `lost` as in `backward.backward`."""
    query, table, indices, rows, counts, sink, out, lse, *kept = saved
    keys = triton.KeyRows(rows, counts, ctx.main, ctx.block)
    where = ctx.scale, ctx.window_size, ctx.entries
    grad_query, grad_table, delta = backward(
        Saved(query, table, keys, indices, out, lse, *where, triton.Kept(*kept) if kept else None),
        grad_out,
        ctx.inverse,
        lost,
    )
    grad_sink = -(torch.exp(sink - lse) * delta).sum(0)
    grad_table = grad_table.to(table.dtype)
    return grad_query, grad_table[: ctx.entries], grad_table[ctx.entries :], grad_sink


class SparseAttention(torch.autograd.Function):
    """See `model.ops.sparse_attention.sparse_attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        entries: Tensor,
        indices: Tensor,
        window: Tensor,
        first: Tensor,
        last: Tensor,
        sink: Tensor,
        options: tuple[float, int, InverseIndex | None, bool],
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        ctx.training = training
        ctx.dtypes = entries.dtype, window.dtype
        wide = entries.to(query.dtype), window.to(query.dtype)
        out, lse, saved = _forward(
            ctx, query.contiguous(), wide[0], indices, wide[1], first, last, sink, options
        )
        ctx.save_for_backward(*saved)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, entries, window and sink."""
        if not ctx.training:
            raise ValueError("the gradient needs row t of the window to be query t's own: leave `last` out")
        saved = ctx.saved_tensors
        nothing = torch.zeros_like(saved[7])
        query, entries, window, sink = _backward(ctx, saved, grad_out.contiguous(), nothing)
        entries, window = entries.to(ctx.dtypes[0]), window.to(ctx.dtypes[1])
        return query, entries, None, window, None, None, sink, None, None


class AttentionSite(torch.autograd.Function):
    """See `model.ops.sparse_attention.attention_site`.

    The output is kept as turned back, which its projection needs. What the attention's backward takes from
    it, the product of each head with its gradient, is the same when both are turned.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        entries: Tensor,
        indices: Tensor,
        window: Tensor,
        first: Tensor,
        last: Tensor,
        sink: Tensor,
        cosine: Tensor,
        sine: Tensor,
        weight: Tensor,
        options: tuple[float, int, InverseIndex | None, bool],
    ) -> tuple[Tensor, Tensor]:
        """Heads projected by group, and log-sum-exp."""
        rotary_(query, cosine, sine, 1.0)
        out, lse, saved = _forward(ctx, query, entries, indices, window, first, last, sink, options)
        rotary_(out, cosine, sine, -1.0)
        ctx.save_for_backward(cosine, sine, weight, *saved)
        ctx.set_materialize_grads(False)
        return group_heads(out, weight, options[3]), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Gradients of query, entries, window, sink and weight."""
        if grad is None:
            return (None,) * 11
        cosine, sine, weight, *saved = ctx.saved_tensors
        heads = saved[6]
        grouped = by_group(grad, len(weight))
        grad_weight = torch.bmm(grouped.transpose(1, 2), by_group(heads, len(weight)))
        grad_out = product(grouped, weight).view_as(heads)
        lost = turned_gradient_(heads, grad_out, cosine, sine)
        query, entries, window, sink = _backward(ctx, saved, grad_out, lost)
        rotary_(query, cosine, sine, -1.0)
        return query, entries, None, window, None, None, sink, None, None, grad_weight, None
