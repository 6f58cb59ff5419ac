"""From the input of a layer to its main keys: a group of m tokens becomes one latent.

With m = 1 the latent is a projection of the token. With m > 1 each channel of the group is a softmax-weighted
mean, computed in float32; a group still open at the end of a cached sequence waits in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import PolicyConfig
from model.layers.exact import fill
from model.layers.linear import Linear, wide_linear
from model.layers.norm import RMSNorm
from model.rows import GroupPlan, Rows


class Compressor(nn.Module):
    """The latents of one KV source layer."""

    def __init__(self, config: PolicyConfig, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = Linear(config.hidden_size, config.head_dim, dtype)
        if ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, dtype)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    def project(self, x: Tensor) -> Tensor:
        """Per token [T, d]: the latent [T, c] (ratio 1), or values and gates [T, 2 c] in float32."""
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        return wide_linear(x, torch.cat([self.wkv.weight, self.wgate.weight]))

    def pool(
        self, projected: Tensor, rows: Rows, plan: GroupPlan, pending: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Latents [B, G, c] of the groups of `plan`; `pending` [slots, ring, 2 c] is updated."""
        if self.ratio == 1:
            return rows.pad(projected)
        aligned = self.aligned(projected, rows, plan, pending)
        latent = self.norm(self._mean(fill(aligned.flatten(0, 1))).to(dtype))
        return latent[: rows.count * aligned.shape[1]].unflatten(0, (rows.count, -1))

    def aligned(self, projected: Tensor, rows: Rows, plan: GroupPlan, pending: Tensor | None) -> Tensor:
        """[B, G, m, 2 c] values and gates of the tokens of each group; `pending` is updated."""
        if plan.source is None:
            return projected[: rows.count * rows.length].view(rows.count, -1, self.ratio, projected.shape[-1])
        if rows.target is not None:
            assert pending is not None and plan.pending is not None
            flat, ring = pending.flatten(0, 1), rows.ring(pending.shape[1])
            waiting = flat.index_select(0, plan.pending)
            flat.index_copy_(0, ring.target, projected.index_select(0, ring.source))
            projected = torch.cat([waiting, projected])
        aligned = projected.index_select(0, plan.source.flatten())
        return aligned.view(rows.count, -1, self.ratio, projected.shape[-1])

    def _mean(self, aligned: Tensor) -> Tensor:
        values, gates = aligned.chunk(2, dim=-1)
        return (values * gates.softmax(dim=-2)).sum(dim=-2)
