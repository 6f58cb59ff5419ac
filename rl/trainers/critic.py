"""A small critic over the policy's hidden states: how good is what comes next, before each of its tokens.

It learns from what the policy's forward pass computed anyway and sends no gradient back, so it can be
switched on and off without touching the policy. Tokens that the policy did not sample have no value:
generalised advantage estimation steps from one sampled token to the next (`rl.algorithms.advantages.gae`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl.algorithms.advantages.gae import gae
from rl.trainers.data import Sample
from rl.trainers.optim_config import require_at_least
from rl.trainers.packing import MicroBatch
from rl.trainers.ranks import ALONE, Ranks

_CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """Settings of the critic; it is trained when the algorithm's advantage needs values.

    Attributes:
        width: of its hidden layer; 0 makes it linear.
        learning_rate: of its AdamW.
        clip: a value moves at most so far from what it was before the step, in the loss; null: freely.
        max_grad_norm: gradients are scaled down to this norm.
    """

    width: int = 64
    learning_rate: float = 1e-3
    clip: float | None = None
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        require_at_least(self, 0, "width", "learning_rate")
        if self.max_grad_norm <= 0 or (self.clip is not None and self.clip <= 0):
            raise ValueError("critic.max_grad_norm and critic.clip are positive; clip=null clips nothing")


@dataclass(frozen=True, slots=True)
class Estimates:
    """Of one sample, [n] each, 0 where no token was sampled: values before the step, and their targets."""

    values: np.ndarray
    returns: np.ndarray


class Critic:
    """Values [T] of hidden states [T, width], and their training.

    Args:
        width: of the hidden states.
        config: settings.
        ranks: processes that train together; the critic is whole on each.
    """

    def __init__(self, width: int, config: CriticConfig, *, ranks: Ranks = ALONE) -> None:
        self.config, self.ranks = config, ranks
        layers = [_first_layer(width, config.width), nn.GELU()] if config.width else []
        last = nn.Linear(config.width or width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(nn.LayerNorm(width), *layers, last)
        self._optimizer = torch.optim.AdamW(self.head.parameters(), lr=config.learning_rate, weight_decay=0.0)
        self._sums = [0.0, 0.0, 0.0, 0.0]

    def to(self, device: torch.device) -> Critic:
        """Moves it; returns itself."""
        self.head.to(device)
        return self

    def values(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[T] the value before each token of `mask` [T], 0 elsewhere; `hidden` [T, d] is of the tokens."""
        positions = mask.nonzero()[:, 0]
        found = self.head(hidden[positions - 1].detach().float())[:, 0]
        return torch.zeros(len(mask), device=mask.device).index_put((positions,), found)

    def accumulate(
        self, hidden: Tensor, batch: MicroBatch, estimates: Sequence[Estimates], count: int
    ) -> None:
        """Adds the gradients of a micro-batch; `count` is the number of trained tokens of the whole step."""
        device, mask = hidden.device, batch.loss_mask
        target, before = (
            torch.from_numpy(np.concatenate([getattr(e, name) for e in estimates])).to(device, torch.float32)
            for name in ("returns", "values")
        )
        values = self.values(hidden, mask)
        loss = (values - target).square()
        if self.config.clip is not None:
            near = before + (values - before).clamp(-self.config.clip, self.config.clip)
            loss = torch.maximum(loss, (near - target).square())
        total = 0.5 * torch.where(mask, loss, 0.0).sum()
        (total / max(count, 1)).backward()
        kept, error = target[mask], (target - values.detach())[mask]
        for i, value in enumerate((total.detach(), error.square().sum(), kept.sum(), kept.square().sum())):
            self._sums[i] += value.item()

    def update(self, count: int) -> dict[str, float]:
        """Applies them; returns loss, mean return, and the explained share of the returns' variance."""
        for parameter in self.head.parameters():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.ranks.total(own)
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), self.config.max_grad_norm)
        self._optimizer.step()
        loss, squared, total, square = (self.ranks.sum(value) / max(count, 1) for value in self._sums)
        self.discard()
        variance = square - total**2
        explained = 1 - squared / variance if variance > 1e-12 else 0.0
        return {"loss": loss, "returns": total, "explained": explained, "grad_norm": norm.item()}

    def discard(self) -> None:
        """Forgets the accumulated gradients."""
        self._optimizer.zero_grad()
        self._sums = [0.0, 0.0, 0.0, 0.0]

    def state_dict(self) -> dict[str, Any]:
        """Weights and momenta."""
        momenta = {str(i): dict(state) for i, state in self._optimizer.state_dict()["state"].items()}
        return {"head": dict(self.head.state_dict()), "momenta": momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.head.load_state_dict(dict(state["head"]))
        groups = self._optimizer.state_dict()["param_groups"]
        momenta = {int(i): dict(values) for i, values in state["momenta"].items()}
        self._optimizer.load_state_dict({"state": momenta, "param_groups": groups})


def _first_layer(width: int, hidden: int) -> nn.Linear:
    """The same on every rank, and in every run."""
    layer = nn.Linear(width, hidden)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(hidden, width, generator=generator) * width**-0.5)
        layer.bias.zero_()
    return layer


def estimate(
    samples: Sequence[Sample], values: Sequence[np.ndarray], *, gamma: float, lam: float, whiten: bool
) -> tuple[list[Sample], list[Estimates]]:
    """Advantages of every token, from values and the reward that each sample's advantages hold.

    The reward stands at the last trained token. Whitening makes the advantages of all tokens together
    have mean 0 and variance 1.

    Returns:
        The samples with their advantages, and what the critic is to learn.
    """
    found: list[np.ndarray] = []
    estimates: list[Estimates] = []
    for sample, value in zip(samples, values, strict=True):
        mask = torch.from_numpy(sample.loss_mask.copy())[None]
        rewards = torch.zeros(1, len(sample))
        last = int(np.flatnonzero(sample.loss_mask)[-1])
        rewards[0, last] = float(sample.advantages[last])
        row = torch.from_numpy(np.asarray(value, np.float32).copy())[None]
        advantages, returns = gae(rewards, row, mask, gamma=gamma, lam=lam, chunk=_CHUNK)
        found.append(advantages[0].numpy())
        estimates.append(Estimates(row[0].numpy(), returns[0].numpy()))
    if whiten:
        every = np.concatenate([a[s.loss_mask] for a, s in zip(found, samples, strict=True)])
        mean, deviation = every.mean(), every.std() + 1e-8
        found = [
            np.where(s.loss_mask, (a - mean) / deviation, 0.0) for a, s in zip(found, samples, strict=True)
        ]
    made = [replace(s, advantages=a.astype(np.float32)) for s, a in zip(samples, found, strict=True)]
    return made, estimates
