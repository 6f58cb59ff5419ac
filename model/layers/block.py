"""One block: an attention site and an expert site around the residual streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.batch import Batch
from model.config import PolicyConfig
from model.layers.attention import Attention, Globals, RunOptions
from model.layers.engram import Engram
from model.layers.engram_table import TableStorage
from model.layers.exact import in_present_mode
from model.layers.hyper_connections import HyperConnection, collapse, mix
from model.layers.moe import MixtureOfExperts, Routing
from model.layers.norm import RMSNorm
from model.layers.packed import ExpertStorage

if TYPE_CHECKING:
    from model.cache.policy_cache import PolicyCache


class Block(nn.Module):
    """Layer `layer` of the policy."""

    def __init__(
        self,
        config: PolicyConfig,
        layer: int,
        dtype: torch.dtype,
        tables: TableStorage = "resident",
        experts: ExpertStorage = "plain",
    ) -> None:
        super().__init__()
        self.layer = layer
        self.recompute = False
        """Whether backward computes activations again instead of keeping them."""
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.hc_attn = HyperConnection(config)
        self.hc_ffn = HyperConnection(config)
        self.attn = Attention(config, layer, dtype)
        self.ffn = MixtureOfExperts(
            config, config.n_routed_experts, config.num_experts_per_tok, dtype, experts
        )
        if layer in config.engram_layer_ids:
            self.engram_column = config.engram_layer_ids.index(layer)
            self.engram = Engram(config, config.engram_num_embeddings[self.engram_column], dtype, tables)
        else:
            self.engram = None

    def prefetch(self, rows: Tensor | None) -> None:
        """Begin to gather this layer's part of the table `rows` [T, layers, columns], if it has a memory."""
        if self.engram is not None and rows is not None:
            self.engram.embed.prefetch(rows[:, self.engram_column])

    def inject(self, streams: Tensor, batch: Batch, rows: Tensor | None) -> Tensor:
        """Streams [T, n, d] with this layer's n-gram memory added, from table `rows` [T, layers, columns]."""
        if self.engram is None or rows is None:
            return streams
        image = batch.image_rows
        text = None if image is None else ~image
        streams = self.engram(streams, rows[:, self.engram_column], text)
        batch.record_layer(self.layer, engram_out=streams)
        return streams

    def attention_input(self, streams: Tensor, weights: Tensor) -> Tensor:
        """What the attention site reads, [T, d], after `inject`."""
        return self.attn_norm(collapse(weights, streams))

    def forward(
        self,
        streams: Tensor,
        x: Tensor,
        batch: Batch,
        shared: list[Globals],
        cache: PolicyCache | None,
        options: RunOptions,
    ) -> tuple[Tensor, Tensor, list[Globals], Routing]:
        """One block.

        Args:
            streams: [T, n, d].
            x: its `attention_input`.
            batch: the tokens' layout.
            shared: what earlier layers handed on, one a group of rows; in a Full layer its own keys.
            cache: to read from and append to; None in training.
            options: of this pass.

        Returns:
            Streams and A for the next block, what is handed on, and where the tokens were routed.
        """
        arguments = (streams, x, batch, shared, cache, options)
        if self.recompute and torch.is_grad_enabled():
            compute = in_present_mode(self._compute)
            return checkpoint(compute, *arguments, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return self._compute(*arguments)

    def _compute(
        self,
        streams: Tensor,
        x: Tensor,
        batch: Batch,
        shared: list[Globals],
        cache: PolicyCache | None,
        options: RunOptions,
    ) -> tuple[Tensor, Tensor, list[Globals], Routing]:
        next_weights, write, carry = self.hc_attn(streams)
        update, shared = self.attn(x, batch, shared, cache, options)
        batch.record_layer(self.layer, attn_out=update)
        streams = mix(carry, streams, write, update)
        weights, write, carry = self.hc_ffn(streams)
        update, routing = self.ffn(
            self.ffn_norm(collapse(next_weights, streams)), batch.image_rows, batch.forced_experts(self.layer)
        )
        batch.record_layer(self.layer, ffn_out=update)
        streams = mix(carry, streams, write, update)
        if batch.trace is not None:
            chosen = {"router_ids": routing.expert_ids, "router_weights": routing.weights}
            scores = routing.affinity + self.ffn.gate.bias_of(batch.image_rows)
            batch.record_layer(self.layer, streams=streams, next_A=weights, **chosen, router_scores=scores)
        return streams, weights, shared, routing
