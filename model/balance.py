"""Keeping experts evenly loaded: a bias moved after each step, and a small loss within each document."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.layers.moe import Routing

BALANCE_SPEED = 0.001
"""Step of the router bias, as published."""


@torch.no_grad()
def expert_load(routings: Sequence[Routing], experts: int, counted: Tensor | None = None) -> Tensor:
    """[layers, experts] how many tokens (those in `counted` [T], if given) chose each expert, float32."""
    ids = [routing.expert_ids if counted is None else routing.expert_ids[counted] for routing in routings]
    chosen = torch.stack([layer.flatten() for layer in ids])
    ones = torch.ones((), device=chosen.device).expand(chosen.shape)
    return torch.zeros(len(routings), experts, device=chosen.device).scatter_add_(1, chosen, ones)


@torch.no_grad()
def move_bias(bias: Tensor, load: Tensor, speed: float) -> None:
    """Add speed * sign(mean load - load) to `bias`, in place."""
    bias.add_(torch.sign(load.mean() - load), alpha=speed)


def balance_loss(routings: Sequence[Routing], cu_seqlens: Tensor) -> Tensor:
    """Sequence-level balance loss: sum_e f_e P_e (DeepSeek-V3, eq. 17-20).

    In each document f_e is the share of choices that went to expert e, times the number of experts, and P_e
    the mean normalised affinity.

    Mean over documents, summed over layers; 1 a layer when balanced.
    """
    affinity = torch.stack([routing.affinity for routing in routings], dim=1)
    chosen = torch.stack([routing.expert_ids for routing in routings], dim=1)
    share = affinity / affinity.sum(-1, keepdim=True).clamp_min(1e-20)
    picks = torch.zeros_like(affinity).scatter_(-1, chosen, 1.0)
    lengths = cu_seqlens.diff()
    # The size is known: asking the lengths for it would wait for the device.
    documents = torch.repeat_interleave(lengths, output_size=len(affinity))
    shape = (lengths.shape[0], *affinity.shape[1:])
    divisor = lengths.to(affinity.dtype)[:, None, None]
    frequency = torch.zeros(shape, dtype=affinity.dtype, device=affinity.device).index_add_(
        0, documents, picks
    )
    frequency = frequency / divisor * (affinity.shape[-1] / chosen.shape[-1])
    mean_share = torch.zeros_like(frequency).index_add(0, documents, share) / divisor
    return (frequency * mean_share).sum(-1).mean(0).sum()
