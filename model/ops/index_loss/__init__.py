"""Training loss of the indexer over what it selected: scores should rank keys as the attention weighs them.

The teacher comes from the log-sum-exp that the attention left; neither its weights nor the scores of all keys
are ever stored.
"""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.index_loss import reference
from model.ops.sparse_attention.inverse import InverseIndex

__all__ = ["index_loss"]


def index_loss(
    heads: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    query: Tensor,
    entries: Tensor,
    lse: Tensor,
    indices: Tensor,
    *,
    scale: float,
    inverse: InverseIndex | None = None,
) -> Tensor:
    """KL of the attention's weights to the softmax of the index scores, both over each token's selection.

    m_j = sum_h exp(scale * q_h . k_j - lse_h), normalised over the selection;
    s_j = sum_h w_h relu(a_h . x_j);
    loss = sum_j m_j (log m_j - log softmax_j(s)).

    Args:
        heads: [T, G, C] index queries a.
        weights: [T, G] fp32 head weights w.
        index_keys: [E, C] index keys x.
        query: [T, H, D] queries of the attention; no gradient, nor for the next two.
        entries: [E, D] its keys.
        lse: [T, H] fp32, log of its softmax's denominator: entries, window and sink.
        indices: [T, K] int32 rows of the selection, padded with -1 at the end.
        scale: of its scores.
        inverse: `invert(indices, E)`, to share it.

    Returns:
        [T] fp32, 0 for a token that selected nothing; differentiable in heads, weights and index keys.
    """
    count, width = len(heads), heads.shape[2]
    same = {len(x) for x in (weights, query, lse, indices)} == {count} and len(entries) == len(index_keys)
    if not same or index_keys.shape[1] != width or entries.shape[1] != query.shape[2]:
        raise ValueError(
            f"heads {tuple(heads.shape)}, weights {tuple(weights.shape)}, index keys "
            f"{tuple(index_keys.shape)}, query {tuple(query.shape)}, entries {tuple(entries.shape)}, lse "
            f"{tuple(lse.shape)} and indices {tuple(indices.shape)} must agree in tokens, entries and widths"
        )
    teacher = query.detach(), entries.detach(), lse.detach(), indices
    if use_kernel("index_loss", heads):
        from model.ops.index_loss.autograd import IndexLoss

        return IndexLoss.apply(heads, weights, index_keys, *teacher, scale, inverse)  # pyright: ignore
    return reference.index_loss(heads, weights, index_keys, *teacher, scale=scale)
