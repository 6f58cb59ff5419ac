"""Teaching the drafter what the policy says, beside the training of the policy or alone.

The drafter has its own optimiser and reads what the policy's forward pass computed anyway; no gradient goes
back. It can therefore be trained in every step of SFT or RL, so that it keeps up with a policy that changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.balance import BALANCE_SPEED, move_bias
from model.dspark_loss import DraftLoss, DraftWeights, draft_anchors, draft_loss
from model.policy import PackedTokens, Policy
from rl.trainers.data import Sample
from rl.trainers.optim import Optimizer, OptimizerConfig, require_at_least
from rl.trainers.packing import MicroBatch, micro_batches
from rl.trainers.ranks import ALONE, Ranks


def _optimizer() -> OptimizerConfig:
    return OptimizerConfig(learning_rate=2e-3, muon_learning_rate=0.02, warmup_steps=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Settings of the drafter's training; it is off unless `anchors` is above 0.

    Attributes:
        anchors: drafts trained on a micro-batch, at tokens drawn at random; 0 trains no drafter.
        weights: of the loss.
        optimizer: rates and schedule.
    """

    anchors: int = 0
    weights: DraftWeights = field(default_factory=DraftWeights)
    optimizer: OptimizerConfig = field(default_factory=_optimizer)

    def __post_init__(self) -> None:
        require_at_least(self, 0, "anchors")


class DraftTrainer:
    """Trains the drafter of a policy.

    Args:
        policy: of which only the drafter is changed.
        config: settings.
        total_steps: which a decaying schedule spans.
        token_budget: most tokens of a micro-batch in `step`.
        temperature: of the sampler that will draft.
        ranks: processes that train together; the drafter is whole on each.

    Raises:
        ValueError: The policy has no drafter, or `config` trains none.
    """

    def __init__(
        self,
        policy: Policy,
        config: DraftConfig,
        *,
        total_steps: int,
        token_budget: int = 8192,
        temperature: float = 1.0,
        ranks: Ranks = ALONE,
    ) -> None:
        if policy.mtp is None or not config.anchors:
            raise ValueError(
                f"there is no drafter to train: the policy has {policy.config.num_nextn_predict_layers} "
                f"draft blocks and draft.anchors is {config.anchors}; take a model with a drafter, such as "
                "model.preset=nano_draft, and draft.anchors above 0, or set draft.anchors=0"
            )
        self.policy, self.drafter, self.config = policy, policy.mtp, config
        self.optimizer = Optimizer(policy, config.optimizer, part="drafter", ranks=ranks)
        self.ranks = ranks
        self.total_steps, self.token_budget, self.temperature = total_steps, token_budget, temperature
        self.steps = 0
        self._losses: list[DraftLoss] = []
        self._shares: list[float] = []

    def accumulate(self, batch: MicroBatch, hidden: Tensor, features: Tensor, share: float) -> None:
        """Adds the gradients of a micro-batch.

        Args:
            batch: the tokens; drafts are trained where `loss_mask` is set.
            hidden: [T, d] of the policy's forward pass.
            features: [T, 3 d] of the same.
            share: this micro-batch's part of the step, so that the shares of a step add up to 1.
        """
        tokens = PackedTokens(batch.token_ids, batch.cu_seqlens)
        possible = draft_anchors(tokens, batch.loss_mask)
        if not len(possible):
            return
        draws = torch.Generator().manual_seed(self.steps * 65_537 + len(self._losses))
        chosen = torch.randperm(len(possible), generator=draws)[: self.config.anchors]
        loss = draft_loss(
            self.policy,
            tokens,
            hidden,
            features,
            batch.loss_mask,
            possible[chosen.to(possible.device)],
            weights=self.config.weights,
            temperature=self.temperature,
        )
        (share * loss.total).backward()
        self._losses.append(loss)
        self._shares.append(share)

    def update(self) -> dict[str, float]:
        """Applies the accumulated gradients and returns metrics by bare name; none when there was nothing.

        Raises:
            OptimizerError: A gradient is not finite; the drafter was not touched.
        """
        if not self.ranks.any(bool(self._losses)):
            return {}
        fraction = self.optimizer.config.fraction(self.steps, self.total_steps)
        norm = self.optimizer.clip()
        self.optimizer.step(fraction)
        if self.optimizer.learning:
            load = torch.zeros(len(self.drafter.blocks), self.policy.config.dspark_n_routed_experts)
            load = sum((loss.expert_load for loss in self._losses), load.to(self.policy.device))
            for block, row in zip(self.drafter.blocks, self.ranks.total(load), strict=True):
                move_bias(block.ffn.gate.bias, row, BALANCE_SPEED)
        metrics = {
            "loss": self._mean([loss.total.detach() for loss in self._losses]),
            "ce": self._mean([loss.ce for loss in self._losses]),
            "tv": self._mean([loss.tv for loss in self._losses]),
            "confidence": self._mean([loss.confidence for loss in self._losses]),
            "accepted": self._mean([loss.accepted for loss in self._losses]),
            "grad_norm": norm,
            "lr": self.optimizer.config.learning_rate * fraction,
        }
        self.steps += 1
        self._losses, self._shares = [], []
        return metrics

    def discard(self) -> None:
        """Forgets the accumulated gradients."""
        self.optimizer.zero_grad()
        self._losses, self._shares = [], []

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Takes one step on `samples` under the policy as it is, and returns the metrics `draft/*`."""
        total = sum(sample.trained_tokens for sample in samples)
        for batch in micro_batches(samples, self.token_budget, self.policy.device):
            with torch.no_grad():
                output = self.policy(PackedTokens(batch.token_ids, batch.cu_seqlens), features=True)
            assert output.features is not None
            share = int(batch.loss_mask.sum()) / max(total, 1)
            self.accumulate(batch, output.hidden, output.features, share)
        return {f"draft/{name}": value for name, value in self.update().items()}

    def _mean(self, values: list[Tensor]) -> float:
        total = sum(share * value.item() for share, value in zip(self._shares, values, strict=True))
        return self.ranks.sum(total) / self.ranks.sum(sum(self._shares))

    def state_dict(self) -> dict[str, Any]:
        """What continuing needs besides the weights."""
        return {"steps": self.steps, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`.

        Raises:
            OptimizerError: It belongs to another policy or configuration.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])
