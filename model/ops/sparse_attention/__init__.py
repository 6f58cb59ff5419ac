"""Sparse attention for training and prefill: selected compressed entries and a sliding window in one softmax.

Entries are gathered in bf16 (unpacked once per group of layers); scores never leave the chip. The backward
recomputes them from the log-sum-exp and is deterministic.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.rotary import rotary
from model.ops.sparse_attention import reference
from model.ops.sparse_attention.heads import group_heads
from model.ops.sparse_attention.inverse import InverseIndex, invert

__all__ = [
    "InverseIndex",
    "Selected",
    "attention_site",
    "group_heads",
    "invert",
    "sparse_attention",
    "table_attention",
]

WINDOW_SIZE = 128


def sparse_attention(
    query: Tensor,
    entries: Tensor,
    indices: Tensor,
    window: Tensor,
    first: Tensor,
    sink: Tensor,
    *,
    scale: float,
    window_size: int = WINDOW_SIZE,
    last: Tensor | None = None,
    inverse: InverseIndex | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of T queries over their selected entries and their window, with a sink per head.

    p_j = exp(s_j) / (exp(sink) + sum_j' exp(s_j')), s_j = scale * (q . k_j), out = sum_j p_j k_j; the window
    of query t are the rows max(first[t], last[t] - window_size + 1) .. last[t] of `window`.

    Args:
        query: [T, H, D].
        entries: [E, D] compressed keys, also the values.
        indices: [T, K] int32 rows of `entries`, distinct in a row, padded with -1 at the end.
        window: [S, D] keys of the sliding window, also the values.
        first: [T] int32, first visible window row (the start of the query's sequence).
        sink: [H] fp32 logits.
        scale: softmax scale.
        window_size: keys in a full window.
        last: [T] int32, the query's own window row; None when S = T and row t belongs to query t (training).
        inverse: `invert(indices, len(entries))`, to share it between the layers that reuse one selection.
        exact: pin the tile order that `sparse_decode(..., exact=True)` uses (4 % slower).

    Returns:
        Output [T, H, D] in the dtype of `query`, differentiable in query, entries, window and sink; log of
        the softmax's denominator [T, H], without gradient.
    """
    _check(query, entries, indices, window, first, sink, last)
    rows = torch.arange(len(query), dtype=torch.int32, device=query.device) if last is None else last
    if use_kernel("sparse_attention", query):
        from model.ops.sparse_attention.autograd import SparseAttention

        options = scale, window_size, inverse, exact
        return SparseAttention.apply(
            query, entries, indices, window, first, rows, sink, options, last is None
        )  # pyright: ignore[reportReturnType]
    out, lse = reference.forward(
        query, entries, indices, window, first, rows, sink, scale=scale, window_size=window_size
    )
    return out, lse.detach()


def attention_site(
    query: Tensor,
    entries: Tensor,
    indices: Tensor,
    window: Tensor,
    first: Tensor,
    sink: Tensor,
    angles: tuple[Tensor, Tensor],
    weight: Tensor,
    *,
    scale: float,
    window_size: int = WINDOW_SIZE,
    inverse: InverseIndex | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sparse_attention` between two rotations, and the projection of its heads by group, for training.

    One op, because each step then works on what the one before made: a copy of the heads, 64 KiB a token,
    takes as long as a seventh of the attention, and apart autograd needs six of them.

    Args:
        query: [T, H, D] before its rotation; overwritten (a result of its own that nobody else reads).
        entries: see `sparse_attention`, also for what follows.
        indices: the same.
        window: the same; row t belongs to query t.
        first: the same.
        sink: the same.
        angles: cosine and sine [T, R / 2] fp32; the query is turned, and the output turned back.
        weight: [G, N, H D / G], one matrix for each group of heads.
        scale: of the scores.
        window_size: keys in a full window.
        inverse: of the indices.
        exact: pin the order of every sum.

    Returns:
        [T, G N], differentiable in query, entries, window, sink and weight; the log-sum-exp [T, H] and the
        turned query [T, H, D], without gradient.
    """
    last = torch.arange(len(query), dtype=torch.int32, device=query.device)
    _check(query, entries, indices, window, first, sink, None)
    if use_kernel("sparse_attention", query):
        from model.ops.sparse_attention.autograd import AttentionSite

        options = scale, window_size, inverse, exact
        arguments = query, entries, indices, window, first, last, sink, *angles, weight
        narrow, lse = AttentionSite.apply(*arguments, options)  # pyright: ignore[reportGeneralTypeIssues]
        return narrow, lse, query.detach()
    query = rotary(query, *angles)
    out, lse = sparse_attention(
        query, entries, indices, window, first, sink, scale=scale, window_size=window_size, inverse=inverse
    )
    return group_heads(rotary(out, *angles, inverse=True), weight, exact), lse, query.detach()


@dataclass(slots=True)
class Selected:
    """What each query attends to in a table of entries followed by window rows; layers share it."""

    entries: int
    """Rows of the table before the window's."""
    indices: Tensor
    """[T, K] int32 rows of entries, -1 at the end."""
    first: Tensor
    """[T] int32 first visible window row, counted from the window's first."""
    last: Tensor
    """[T] int32 the query's own window row."""
    window_size: int = WINDOW_SIZE
    rows: Any = field(default=None, repr=False)
    """What the kernel derives from it, once."""


def table_attention(
    query: Tensor, table: Tensor, selected: Selected, sink: Tensor, *, scale: float, exact: bool = False
) -> Tensor:
    """`sparse_attention` without gradient over a `table` [entries + window, D]: [T, H, D]."""
    if use_kernel("table_attention", query):
        from model.ops.sparse_attention import triton
        from model.ops.sparse_attention.forward import forward

        if selected.rows is None:
            selected.rows = triton.joint_rows(
                selected.indices,
                selected.first,
                selected.last,
                entries=selected.entries,
                window_size=selected.window_size,
                width=query.shape[2],
            )
        return forward(query, table, selected.rows, sink, scale=scale, exact=exact)[0]
    entries, window = table[: selected.entries], table[selected.entries :]
    where = (selected.indices, window, selected.first, selected.last)
    return reference.forward(query, entries, *where, sink, scale=scale, window_size=selected.window_size)[0]


def _check(
    query: Tensor,
    entries: Tensor,
    indices: Tensor,
    window: Tensor,
    first: Tensor,
    sink: Tensor,
    last: Tensor | None,
) -> None:
    count, heads, channels = query.shape
    if entries.shape[-1] != channels or window.shape[-1] != channels or sink.shape != (heads,):
        raise ValueError(
            f"query {tuple(query.shape)} does not fit "
            f"entries {tuple(entries.shape)}, window {tuple(window.shape)} "
            f"and sink {tuple(sink.shape)}: they need the query's channels and heads"
        )
    if len(indices) != count or first.shape != (count,):
        raise ValueError(
            f"{count} queries need indices [T, K] and first [T], got {len(indices)} and {len(first)} rows"
        )
    if last is None and len(window) != count:
        raise ValueError(
            f"the window has {len(window)} rows for {count} queries; "
            "pass `last` when row t is not query t's own"
        )
