"""Sparse attention written in tilelang, as its documentation teaches: the peer of our forward kernel."""

import functools
from typing import Any

from torch import Tensor

_LOG2E = 1.4426950408889634


@functools.cache
def _compiled(heads: int, width: int, keys: int, scale: float, policy: str, block: int, stages: int) -> Any:
    """One program a query: `block` gathered keys at a time, scored, weighed and added by two products."""
    import tilelang
    import tilelang.language as T

    tilelang.set_log_level("WARNING")
    tokens, rows = T.dynamic("tokens"), T.dynamic("rows")
    parts, factor = getattr(T.GemmWarpPolicy, policy), scale * _LOG2E

    @T.prim_func
    def attention(
        query: T.Tensor((tokens, heads, width), "bfloat16"),
        table: T.Tensor((rows, width), "bfloat16"),
        chosen: T.Tensor((tokens, keys), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((tokens, heads, width), "bfloat16"),
    ):
        with T.Kernel(tokens, threads=256) as token:
            q = T.alloc_shared((heads, width), "bfloat16")
            k = T.alloc_shared((block, width), "bfloat16")
            p = T.alloc_shared((heads, block), "bfloat16")
            scores = T.alloc_fragment((heads, block), "float32")
            weighed = T.alloc_fragment((heads, width), "float32")
            top = T.alloc_fragment((heads,), "float32")
            before = T.alloc_fragment((heads,), "float32")
            shrink = T.alloc_fragment((heads,), "float32")
            total = T.alloc_fragment((heads,), "float32")
            added = T.alloc_fragment((heads,), "float32")
            T.copy(query[token, 0:heads, 0:width], q)
            T.clear(weighed)
            for h in T.Parallel(heads):
                top[h] = sink[h] / scale
                total[h] = 1.0
            for step in T.Pipelined(keys // block, num_stages=stages):
                for j, d in T.Parallel(block, width):
                    k[j, d] = table[T.max(chosen[token, step * block + j], 0), d]
                for h, j in T.Parallel(heads, block):
                    scores[h, j] = T.if_then_else(
                        chosen[token, step * block + j] >= 0, 0, -T.infinity("float32")
                    )
                T.gemm(q, k, scores, transpose_B=True, policy=parts)
                T.copy(top, before)
                T.reduce_max(scores, top, dim=1, clear=False)
                for h in T.Parallel(heads):
                    shrink[h] = T.exp2((before[h] - top[h]) * factor)
                for h, j in T.Parallel(heads, block):
                    scores[h, j] = T.exp2(scores[h, j] * factor - top[h] * factor)
                T.reduce_sum(scores, added, dim=1)
                for h in T.Parallel(heads):
                    total[h] = total[h] * shrink[h] + added[h]
                for h, d in T.Parallel(heads, width):
                    weighed[h, d] *= shrink[h]
                T.copy(scores, p)
                T.gemm(p, k, weighed, policy=parts)
            for h, d in T.Parallel(heads, width):
                weighed[h, d] /= total[h]
            T.copy(weighed, out[token, 0:heads, 0:width])

    fast = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
    return tilelang.compile(attention, out_idx=[4], pass_configs=fast)


def sparse_attention(
    query: Tensor,
    table: Tensor,
    rows: Tensor,
    sink: Tensor,
    scale: float,
    *,
    policy: str = "FullCol",
    block: int = 64,
    stages: int = 2,
) -> Tensor:
    """[T, H, D] of queries [T, H, D] over `rows` [T, K] int32 of a table [R, D], -1 for none, with a sink."""
    _, heads, width = query.shape
    kernel = _compiled(heads, width, rows.shape[1], scale, policy, block, stages)
    return kernel(query, table, rows, sink)
