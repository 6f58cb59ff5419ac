"""Training signal of the indexer: its scores should rank keys as the main attention weighs them.

The published report does not state the loss; this is the Kullback-Leibler form known from earlier models of
the family. For a token, the teacher is the attention mass of all heads over the supervised main keys,
normalised; the student is the softmax of the index scores over the same keys. Only the indexer gets a
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.layers.indexer import IndexQueries, index_scores, token_chunks

Variant = Literal["sparse", "dense"]
"""Supervise over each token's own selection, or over everything it could have selected."""


@dataclass(slots=True)
class Supervision:
    """Collects the loss of every indexer during one forward pass."""

    variant: Variant
    sums: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, total: Tensor, count: Tensor) -> None:
        """Add the loss summed over `count` tokens of `layer`."""
        self.sums[layer] = self.sums[layer] + total if layer in self.sums else total
        self.counts[layer] = self.counts[layer] + count if layer in self.counts else count

    def total(self, tokens: int) -> Tensor:
        """Sum over layers of the mean over all `tokens`; the first ones of a document have nothing to rank.

        Over all, so that means of micro-batches weighted by their tokens are the mean of the batch.
        """
        means = [total / tokens for total in self.sums.values()]
        return torch.stack(means).sum() if means else torch.zeros(())


@dataclass(frozen=True, slots=True)
class Teacher:
    """The main attention of a layer, as data: nothing here gets a gradient."""

    query: Tensor
    """[B, L, H, c]."""
    keys: Tensor
    """[B, N + S, c]: window keys, then main keys."""
    blocked: Tensor
    """[B, L, N + S] bool over the same keys."""
    sink: Tensor
    """[H]."""

    def mass(self, begin: int, end: int, supervised: Tensor) -> Tensor:
        """[B, C, S] attention over the supervised keys, summed over heads and normalised."""
        query = self.query[:, begin:end].float()
        batch, length, heads, width = query.shape
        scores = torch.bmm(query.reshape(batch, length * heads, width), self.keys.float().transpose(1, 2))
        scores = scores.mul_(width**-0.5).view(batch, length, heads, -1)
        scores.masked_fill_(self.blocked[:, begin:end].unsqueeze(2), -torch.inf)
        sink = self.sink.float().view(1, 1, heads, 1).expand(batch, length, heads, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)
        main = weights[..., -1 - supervised.shape[-1] : -1].sum(2) * supervised
        return main / main.sum(-1, keepdim=True).clamp_min(1e-20)


def indexer_loss(
    queries: IndexQueries, index_keys: Tensor, teacher: Teacher, supervised: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss summed over tokens, and the number of tokens that have something to learn.

    Args:
        queries: the student's, with gradient.
        index_keys: [B, S, c_I], with gradient.
        teacher: the main attention.
        supervised: [B, L, S] keys to compare over.
        real: [B, L] false on padding.
    """
    total, count = torch.zeros((), device=real.device), torch.zeros((), device=real.device)
    for begin, end in token_chunks(queries, index_keys.shape[1]):
        chunk_supervised = supervised[:, begin:end]
        valid = real[:, begin:end] & chunk_supervised.any(-1)
        with torch.no_grad():
            mass = teacher.mass(begin, end, chunk_supervised)
        total = total + checkpoint(  # pyright: ignore[reportOperatorIssue]
            _divergence, queries, index_keys, begin, end, mass, chunk_supervised, valid, use_reentrant=False
        )
        count = count + valid.sum()
    return total, count


def _divergence(
    queries: IndexQueries, keys: Tensor, begin: int, end: int, mass: Tensor, supervised: Tensor, valid: Tensor
) -> Tensor:
    """Sum over valid tokens of sum_j p_j (log p_j - log softmax_j of the scores over the supervised keys)."""
    scores = index_scores(queries, keys, begin, end)
    # A row without supervised keys is excluded below; a finite filler keeps its gradient finite.
    student = scores.masked_fill(~supervised, -1e30).log_softmax(-1).masked_fill(~supervised, 0.0)
    divergence = (mass * (mass.clamp_min(1e-10).log() - student)).sum(-1)
    return torch.where(valid, divergence, 0.0).sum()
