"""Joins the forward and backward kernels of sparse attention for autograd."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.sparse_attention import gluon, triton
from model.ops.sparse_attention.backward import Saved, backward
from model.ops.sparse_attention.inverse import InverseIndex


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
        scale: float,
        window_size: int,
        inverse: InverseIndex | None,
        exact: bool,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run the kernel over one table of entries and window rows."""
        table = torch.cat([entries.to(query.dtype), window.to(query.dtype)])
        query, indices = query.contiguous(), indices.contiguous()
        keys = triton.joint_rows(
            indices, first, last, entries=len(entries), window_size=window_size, width=query.shape[2]
        )
        if gluon.supports(query, keys) and not exact:
            out, lse = gluon.forward(query, table, keys, sink, scale=scale)
        else:
            out, lse = triton.forward(query, table, keys, sink, scale=scale, exact=exact)
        ctx.save_for_backward(query, table, indices, keys.rows, keys.counts, sink, out, lse)
        ctx.layout = keys.main, keys.block
        ctx.constants = scale, window_size, len(entries), inverse, training, entries.dtype, window.dtype
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, entries, window and sink."""
        query, table, indices, rows, counts, sink, out, lse = ctx.saved_tensors
        scale, window_size, count, inverse, training, entries_dtype, window_dtype = ctx.constants
        if not training:
            raise ValueError("the gradient needs row t of the window to be query t's own: leave `last` out")
        keys = triton.KeyRows(rows, counts, *ctx.layout)
        saved = Saved(query, table, keys, indices, out, lse, scale, window_size, count)
        grad_query, grad_table, delta = backward(saved, grad_out.contiguous(), inverse)
        grad_sink = -(torch.exp(sink - lse) * delta).sum(0)
        grad_entries = grad_table[:count].to(entries_dtype)
        grad_window = grad_table[count:].to(window_dtype)
        return (
            grad_query,
            grad_entries,
            None,
            grad_window,
            None,
            None,
            grad_sink,
            None,
            None,
            None,
            None,
            None,
        )
