"""Engram: a memory of n-grams, looked up by hash and gated into each residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import PolicyConfig
from model.layers.engram_table import EngramTable, TableStorage
from model.layers.linear import Linear
from model.ops.engram_gate import engram_gate


class Engram(nn.Module):
    """One layer's table and its projection to a key per stream and a shared value."""

    def __init__(
        self, config: PolicyConfig, rows: int, dtype: torch.dtype, tables: TableStorage = "resident"
    ) -> None:
        super().__init__()
        d, n = config.hidden_size, config.hc_mult
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.streams, self.width, self.eps = n, d, config.rms_norm_eps
        self.embed = EngramTable(rows, config.engram_head_dim, dtype, tables)
        self.wkv = Linear(
            columns * config.engram_head_dim, (n + 1) * d, dtype, config.quantization is not None
        )
        self.q_weight = nn.Parameter(torch.ones(n, d, dtype=dtype))
        self.k_weight = nn.Parameter(torch.ones(n, d, dtype=dtype))

    def forward(self, streams: Tensor, rows: Tensor, text: Tensor | None) -> Tensor:
        """Streams [T, n, d] with the memory of table `rows` [T, columns] added.

        `text` [T] bool is false on image tokens, which take nothing; None stands for text only.
        """
        return self.gate(streams, self.project(rows), text)

    def project(self, rows: Tensor) -> Tensor:
        """[T, (n + 1) d], a key per stream and a value, of table `rows` [T, columns]."""
        return self.wkv(self.embed(rows).flatten(1))

    def gate(self, streams: Tensor, projected: Tensor, text: Tensor | None) -> Tensor:
        """Streams [T, n, d] with what `project` gave added."""
        return engram_gate(streams, projected, self.q_weight, self.k_weight, text, eps=self.eps)
