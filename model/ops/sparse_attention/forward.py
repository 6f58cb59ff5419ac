"""The forward pass by the kernel that serves the shapes and the mode."""

from torch import Tensor

from model.ops.sparse_attention import gluon, triton


def forward(
    query: Tensor,
    table: Tensor,
    keys: triton.KeyRows,
    sink: Tensor,
    *,
    scale: float,
    exact: bool,
    keep: bool = False,
) -> tuple[Tensor, Tensor, triton.Kept | None]:
    """Output [T, H, D] and log-sum-exp [T, H] over `table` = entries followed by window rows.

    With `keep` also the probabilities, where the shapes are such that the backward reads them.
    """
    special = gluon.supports(query, keys)
    if special and not exact:
        kept = triton.Kept.empty(query, keys, 2) if keep else None
        return *gluon.forward(query, table, keys, sink, scale=scale, kept=kept), kept
    kept = triton.Kept.empty(query, keys, 1) if keep and special else None
    return *triton.forward(query, table, keys, sink, scale=scale, exact=exact, kept=kept), kept
