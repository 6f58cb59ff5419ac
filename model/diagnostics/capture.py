"""Reads the attention of every layer during a forward pass, from outside the layers.

A hook on each attention module sees its input and what it hands on; queries and window keys are computed
again from that input. The layers themselves know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.batch import PackedTokens
from model.layers.attention import Attention, Globals
from model.layers.indexer import IndexQueries
from model.layers.selection import Selection
from model.policy import Policy, PolicyOutput
from model.rows import Rows

_CHUNK_ELEMENTS = 1 << 24
"""Attention scores of all heads held at once."""


@dataclass(frozen=True, slots=True)
class AttentionView:
    """The attention of one layer over the documents of one group of rows."""

    layer: int
    attention: Attention
    rows: Rows
    query: Tensor
    """[B, L, H, c]."""
    window: Tensor
    """[B, L, c] window keys."""
    known: Globals
    """Main keys and selection that the layer used."""
    asked: IndexQueries | None
    """Rows of index queries; None where the layer has no indexer."""

    @property
    def visible(self) -> Tensor:
        """[B, L] number of main keys that a token may see."""
        return self.rows.visible(self.attention.ratio)

    def chunks(self) -> list[tuple[int, int]]:
        """Ranges of tokens whose dense scores fit in memory together."""
        batch, length, heads, _ = self.query.shape
        main = self.known.main
        width = self.window.shape[1] + (0 if main is None else main.dense().shape[1])
        step = max(1, _CHUNK_ELEMENTS // (batch * heads * width))
        return [(begin, min(begin + step, length)) for begin in range(0, length, step)]

    def dense_mass(self, begin: int, end: int) -> Tensor:
        """[B, end - begin, S] attention, mean over heads, on each main key if all visible ones were attended.

        Window keys and the sink take their share: a row sums to less than 1.
        """
        assert self.known.main is not None
        main = self.known.main.dense()
        everything = Selection(self.visible[:, begin:end], main.shape[1], None)
        blocked = everything.blocked_with(self.rows.window_blocked[:, begin:end])
        keys = torch.cat([self.window, main], dim=1).float()
        query = self.query[:, begin:end].float()
        batch, length, heads, width = query.shape
        scores = torch.bmm(query.reshape(batch, length * heads, width), keys.transpose(1, 2))
        scores = scores.mul_(width**-0.5).view(batch, length, heads, -1)
        scores.masked_fill_(blocked.unsqueeze(2), -torch.inf)
        sink = self.attention.attn_sink.float().view(1, 1, heads, 1).expand(batch, length, heads, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)
        return weights[..., self.window.shape[1] : -1].mean(2)


Visit = Callable[[AttentionView], None]


@torch.no_grad()
def visit_attention(policy: Policy, tokens: PackedTokens, visit: Visit) -> PolicyOutput:
    """Runs `policy` over `tokens` and calls `visit` for every layer and group of rows, in order."""
    handles = [
        block.attn.register_forward_hook(_hook(block.layer, visit), with_kwargs=True)
        for block in policy.blocks
    ]
    try:
        return policy(tokens)
    finally:
        for handle in handles:
            handle.remove()


def _hook(layer: int, visit: Visit) -> Callable[..., None]:
    def see(
        attention: Attention,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: tuple[Tensor, list[Globals]],
    ) -> None:
        x, batch, options = args[0], args[1], args[4]
        rotation, per_head = batch.rotations(attention.ratio, attention.frequencies)
        latent, query = attention.queries(x, per_head)
        window = attention.window_keys(x, rotation, options.fake_quant)
        asked = None
        if hasattr(attention, "indexer"):
            asked = attention.indexer.queries(x, latent, per_head, options.fake_quant)
        for rows, known in zip(batch.rows, result[1], strict=True):
            asked_rows = None
            if asked is not None:
                asked_rows = IndexQueries(rows.pad(asked.heads), rows.pad(asked.weights))
            view = (layer, attention, rows, rows.pad(query), rows.pad(window), known, asked_rows)
            visit(AttentionView(*view))

    return see
