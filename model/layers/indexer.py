"""The indexer: cheap scores of every main key for every token, and the choice of the best.

    I[i, j] = sum_h w[i, h] relu(q[i, h] . k[j])

Scores get no gradient from the language-model loss (the choice is discrete); `indexer_loss` trains them on
request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import PolicyConfig
from model.layers.exact import is_exact
from model.layers.linear import Linear, widen
from model.layers.norm import RMSNorm
from model.layers.rope import Rotation, rotate
from model.layers.selection import Selection, membership
from model.layers.top_k import top_k_lowest_index
from model.quant.blocks import round_index, straight_through

_CHUNK_ELEMENTS = 1 << 24
"""Scores of all heads held at once; longer rows are scored a chunk of tokens at a time."""
_TILE_KEYS = 64
"""Keys scored by one product in exact mode."""


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """What tokens ask with: `heads` [..., h, c] and `weights` [..., h], packed or as rows [B, L, ...]."""

    heads: Tensor
    weights: Tensor


class Indexer(nn.Module):
    """Queries of an index source layer; keys too where the layer also owns main keys."""

    def __init__(self, config: PolicyConfig, owns_keys: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        quantized = config.quantization is not None
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width, dtype, quantized)
        self.weights_proj = Linear(config.hidden_size, self.heads, dtype)
        if owns_keys:
            self.wk = Linear(config.head_dim, self.width, dtype)
            self.k_norm = RMSNorm(self.width, config.rms_norm_eps, dtype)

    def keys(self, latent: Tensor, rotation: Rotation, fake_quant: bool) -> Tensor:
        """[..., c_I] from latents [..., c] before their rotation."""
        keys = rotate(self.k_norm(self.wk(latent)), rotation)
        return straight_through(keys, round_index) if fake_quant else keys

    def queries(self, x: Tensor, query_latent: Tensor, rotation: Rotation, fake_quant: bool) -> IndexQueries:
        """Packed: heads [T, h, c_I], head weights [T, h]; `rotation` per head."""
        heads = rotate(self.wq_b(query_latent).unflatten(-1, (self.heads, self.width)), rotation)
        weights = self.weights_proj(x) * (self.width**-0.5 * self.heads**-0.5)
        return IndexQueries(straight_through(heads, round_index) if fake_quant else heads, weights)


def index_scores(queries: IndexQueries, keys: Tensor, begin: int, end: int) -> Tensor:
    """[B, end - begin, S] scores in float32 of some tokens over all keys [B, S, c_I]; nothing is masked."""
    heads = widen(queries.heads[:, begin:end])
    batch, length, count, width = heads.shape
    dots = torch.bmm(heads.reshape(batch, length * count, width), widen(keys).transpose(1, 2)).relu()
    weights = widen(queries.weights[:, begin:end]).reshape(batch * length, 1, count)
    scores = torch.bmm(weights, dots.view(batch * length, count, -1)).view(batch, length, -1)
    return scores.float() if queries.heads.dtype is torch.bfloat16 else scores


def _exact_scores(queries: IndexQueries, keys: Tensor, begin: int, end: int) -> Tensor:
    """`index_scores` by one product of fixed shape a token and tile of keys."""
    heads = widen(queries.heads[:, begin:end])
    weights = widen(queries.weights[:, begin:end]).unsqueeze(-2)
    (batch, length), width = heads.shape[:2], keys.shape[1]
    tiles = F.pad(widen(keys), (0, 0, 0, -width % _TILE_KEYS)).unflatten(1, (-1, _TILE_KEYS)).transpose(2, 3)
    if length == 1:
        sequences = [(heads.flatten(0, 1), weights.flatten(0, 1), tiles)]
    else:
        sequences = list(zip(heads, weights, tiles.unsqueeze(1), strict=True))
    scores = []
    for head, weight, own_tiles in sequences:
        dots = [torch.bmm(head, tile.expand(head.shape[0], -1, -1)).relu_() for tile in own_tiles.unbind(1)]
        scores.append(torch.cat([torch.bmm(weight, dot) for dot in dots], dim=-1))
    joined = torch.cat(scores).view(batch, length, -1)[..., :width]
    return joined.float() if queries.heads.dtype is torch.bfloat16 else joined


def token_chunks(queries: IndexQueries, width: int) -> list[tuple[int, int]]:
    """Ranges of tokens whose scores over `width` keys fit in memory together."""
    batch, length, heads, _ = queries.heads.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * width))
    return [(begin, min(begin + step, length)) for begin in range(0, length, step)]


@dataclass(frozen=True, slots=True)
class CandidateRule:
    """The candidate source keeps `blocks` blocks of `size` keys a token for later layers."""

    blocks: int
    size: int

    def count(self, width: int) -> int:
        """Blocks that `width` keys make."""
        return -(-width // self.size)

    def choose(self, scores: Tensor, visible: Tensor) -> Tensor:
        """[B, L, blocks] block numbers, -1 for an unused place, from masked scores [B, L, S].

        The block of the newest visible key is always kept.
        """
        count = self.count(scores.shape[-1])
        padded = F.pad(scores, (0, count * self.size - scores.shape[-1]), value=-torch.inf)
        best = padded.unflatten(-1, (count, self.size)).amax(-1)
        newest = torch.div(visible - 1, self.size, rounding_mode="floor").unsqueeze(-1)
        best = best.masked_fill(torch.arange(count, device=scores.device) == newest, torch.inf)
        chosen = top_k_lowest_index(best, min(self.blocks, count))
        return chosen.masked_fill(best.gather(-1, chosen) == -torch.inf, -1)

    def expand(self, blocks: Tensor, width: int) -> Tensor:
        """[B, L, S] bool mask over keys from block numbers."""
        return membership(blocks, self.count(width)).repeat_interleave(self.size, dim=-1)[..., :width]


@dataclass(frozen=True, slots=True)
class Choice:
    """Result of a selection: keys, blocks kept for later layers (None: all), masked scores if asked for."""

    selection: Selection
    candidates: Tensor | None
    scores: Tensor | None


@torch.no_grad()
def select(
    queries: IndexQueries,
    keys: Tensor,
    visible: Tensor,
    top_k: int,
    rule: CandidateRule | None,
    candidates: Tensor | None,
    keep_scores: bool = False,
) -> Choice:
    """Choose up to `top_k` visible keys for each token.

    Args:
        queries: of the tokens.
        keys: [B, S, c_I].
        visible: [B, L] number of keys a token may see.
        top_k: most keys a token selects.
        rule: how to make (`candidates` is None) or read candidate blocks; None where the layer does neither.
        candidates: [B, L, blocks] blocks this layer is restricted to; None for no restriction.
        keep_scores: also return the masked scores [B, L, S].
    """
    width = keys.shape[1]
    makes = rule if candidates is None else None
    if makes is not None and makes.count(width) <= makes.blocks:
        makes = None
    if width <= top_k and makes is None and candidates is None and not keep_scores:
        return Choice(Selection(visible, width, None), None, None)
    chosen, blocks, kept = [], [], []
    for begin, end in token_chunks(queries, width):
        scores = (_exact_scores if is_exact() else index_scores)(queries, keys, begin, end)
        allowed = torch.arange(width, device=keys.device) < visible[:, begin:end, None]
        if candidates is not None and rule is not None:
            allowed &= rule.expand(candidates[:, begin:end], width)
        scores.masked_fill_(~allowed, -torch.inf)
        if makes is not None:
            blocks.append(makes.choose(scores, visible[:, begin:end]))
        index = top_k_lowest_index(scores, min(top_k, width))
        chosen.append(torch.where(allowed.gather(-1, index), index, -1))
        kept += [scores] if keep_scores else []
    return Choice(
        Selection(visible, width, torch.cat(chosen, dim=1)),
        torch.cat(blocks, dim=1) if blocks else None,
        torch.cat(kept, dim=1) if kept else None,
    )
