"""Sparse attention for decoding, read straight from the packed FP4 cache and the FP8 window.

The bf16 form of the same keys is 3.5 times larger, and at decode the keys are read once per query: unpacking
inside the kernel saves both the copy and the memory.
"""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.records import channels
from model.ops.sparse_decode import reference

__all__ = ["sparse_decode"]


def sparse_decode(
    query: Tensor,
    records: Tensor,
    indices: Tensor,
    window: Tensor,
    window_indices: Tensor,
    sink: Tensor,
    *,
    scale: float,
    counts: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    exact: bool = False,
) -> Tensor:
    """Attention of B query tokens over selected main records and window records, with a sink per head.

    p_j = exp(s_j) / (exp(sink) + sum_j' exp(s_j')), s_j = scale * (q . k_j), out = sum_j p_j k_j.

    Args:
        query: [B, H, D].
        records: [E, 9 D / 16] uint8, main records of every sequence (`model.ops.records`).
        indices: [B, K] int32 rows of `records`, padded with -1 at the end.
        window: [S, 33 D / 32] uint8, window records.
        window_indices: [B, W] int32 rows of `window`, padded with -1 at the end.
        sink: [H] fp32 logits.
        scale: softmax scale.
        counts: [B, 2] int32, how many of the two lists' rows are set. One tensor serves all layers of a
            step; without it each program counts for itself (about 2 us).
        rope: cosine and sine [B, R / 2] fp32: the query's last R channels are turned first
            (`model.ops.rotary`), and those of the output back.
        exact: keep the tile order of `sparse_attention(..., exact=True)`, whose output this then equals bit
            for bit for any batch when both list the same keys in the same order (the window oldest first).

    Returns:
        [B, H, D] in the dtype of `query`.
    """
    rows, heads, width = query.shape
    if channels(records, "main") != width or channels(window, "window") != width or sink.shape != (heads,):
        raise ValueError(
            f"query is {tuple(query.shape)}; records {tuple(records.shape)}, window {tuple(window.shape)} "
            f"and sink {tuple(sink.shape)} must be for the same head width and number of heads"
        )
    if indices.shape[0] != rows or window_indices.shape[0] != rows:
        raise ValueError(
            f"{rows} queries need as many rows of indices, "
            f"got {indices.shape[0]} and {window_indices.shape[0]}"
        )
    if use_kernel("sparse_decode", query):
        from model.ops.sparse_decode import triton

        return triton.decode(
            query,
            records,
            indices,
            window,
            window_indices,
            sink,
            scale=scale,
            counts=counts,
            rope=rope,
            exact=exact,
        )
    return reference.decode(query, records, indices, window, window_indices, sink, scale=scale, rope=rope)
