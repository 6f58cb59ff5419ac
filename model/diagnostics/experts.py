"""Whether the router uses its experts: spread of the load, overloaded and dead ones, by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import PackedTokens
from model.policy import Policy


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """How the tokens of one layer spread over its experts."""

    layer: int
    entropy: float
    """Of the load, as a share of its maximum log(experts): 1 is even."""
    largest: float
    """Load of the busiest expert over the mean load."""
    dead: int
    """Experts that got no token."""
    experts: int


@torch.no_grad()
def expert_load(policy: Policy, tokens: PackedTokens) -> tuple[LayerLoad, ...]:
    """The load of every layer's experts over `tokens`."""
    aux = policy(tokens).aux
    load = aux.expert_load
    return load_of(load if aux.image_expert_load is None else load + aux.image_expert_load)


def load_of(counts: Tensor) -> tuple[LayerLoad, ...]:
    """The same from counts [layers, experts]."""
    shares = counts.double() / counts.double().sum(-1, keepdim=True).clamp_min(1)
    experts = counts.shape[-1]
    entropy = torch.special.entr(shares).sum(-1)
    even = torch.tensor(float(experts)).log().clamp_min(1e-9)
    dead = (counts == 0).sum(-1)
    columns = zip((entropy / even).tolist(), (shares.amax(-1) * experts).tolist(), dead.tolist(), strict=True)
    return tuple(LayerLoad(layer, *column, experts) for layer, column in enumerate(columns))
