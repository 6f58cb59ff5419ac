"""How near a discrete choice was to another one, from our own scores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model.config import PolicyConfig


def margin(
    config: PolicyConfig, layer: int, kind: str, ours: Mapping[str, Tensor], length: int
) -> Tensor | None:
    """Distance between the last accepted and the first rejected value, infinite where nothing is rejected.

    Args:
        config: of the policy.
        layer: whose choice.
        kind: "router_margin", "index_margin" or "candidate_margin".
        ours: what a traced pass recorded.
        length: tokens of a row.

    Returns:
        [B * S] or [B, S]; None where nothing was scored.
    """
    name = "router_scores" if kind == "router_margin" else "index_scores"
    scores = ours.get(f"layers.{layer}.{name}")
    if scores is None:
        return None
    count = config.num_experts_per_tok if kind == "router_margin" else config.index_topk
    if kind == "candidate_margin":
        scores, count = _block_scores(config, layer, scores, length), config.candidate_topk_blocks
    if scores.shape[-1] <= count:
        return torch.full(scores.shape[:-1], torch.inf)
    values = scores.sort(-1, descending=True).values
    distance = values[..., count - 1] - values[..., count]
    return distance.masked_fill(values[..., count] == -torch.inf, torch.inf)


def _block_scores(config: PolicyConfig, layer: int, scores: Tensor, length: int) -> Tensor:
    size = config.candidate_block_size
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf)
    best = padded.unflatten(-1, (-1, size)).amax(-1)
    newest = ((torch.arange(length) + 1) // config.ratio(layer) - 1) // size
    return best.masked_fill(torch.arange(best.shape[-1]) == newest[:, None], torch.inf)
