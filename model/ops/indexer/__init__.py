"""Which compressed entries a query attends to: index scores and an exact top-k.

Scores are made for a chunk of queries at a time; at 64K tokens all of them would take 8.6 GB.
"""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.indexer import reference

__all__ = ["index_scores", "index_topk", "queries_at_once"]

_QUERIES, _FEWEST, _SCORES = 1024, 64, 1 << 27


def queries_at_once(keys: int) -> int:
    """Queries whose scores over so many keys are held at once: 1024, or fewer to stay within 512 MiB."""
    return max(_FEWEST, min(_QUERIES, _SCORES // max(1, keys) // _FEWEST * _FEWEST))


def index_topk(
    query: Tensor, keys: Tensor, weights: Tensor, k: int, *, begins: Tensor, ends: Tensor
) -> Tensor:
    """Rows of the k best keys of each query, ascending.

    Score, in fp32: sum_h weights[h] * relu(query[h] . key).

    Args:
        query: [T, H, D] bf16, or float8_e4m3fn where the values are exact in it.
        keys: [S, D] of the same dtype.
        weights: [T, H] fp32, any sign.
        k: how many.
        begins: [T] int32, first visible key row of each query.
        ends: [T] int32, one past its last visible key row.

    Returns:
        [T, k] int32 rows of `keys` (ties by lowest row), padded with -1.
    """
    if query.dtype != keys.dtype or query.shape[-1] != keys.shape[-1] or weights.shape != query.shape[:2]:
        raise ValueError(
            f"query {query.dtype} {tuple(query.shape)}, keys {keys.dtype} {tuple(keys.shape)} and weights "
            f"{tuple(weights.shape)} must agree in dtype, head width and heads"
        )
    if use_kernel("index_topk", query):
        from model.ops.indexer import triton

        return triton.index_topk(query, keys, weights, k, begins=begins, ends=ends)
    return reference.index_topk(query, keys, weights, k, begins=begins, ends=ends)


def index_scores(query: Tensor, keys: Tensor, weights: Tensor, *, begins: Tensor, ends: Tensor) -> Tensor:
    """The scores [T, S] fp32 that `index_topk` chooses by; undefined for keys a query does not see."""
    if use_kernel("index_scores", query):
        from model.ops.indexer import triton

        arguments = (query.contiguous(), keys.contiguous(), weights.contiguous())
        return triton.index_scores(*arguments, begins=begins, ends=ends)
    return reference.index_scores(query, keys, weights)
