"""Supervised fine-tuning: the mean negative log-likelihood of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from model.layers.indexer_loss import Variant
from model.policy import Policy
from rl.trainers.base import Trainer
from rl.trainers.data import Sample
from rl.trainers.draft import DraftConfig
from rl.trainers.forward import token_outputs
from rl.trainers.optim import OptimizerConfig, require_at_least
from rl.trainers.packing import micro_batches


def _optimizer() -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=3e-3, muon_learning_rate=0.03, weight_decay=0.01, warmup_steps=50, decay="cosine"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig:
    """Settings of the warm start. The defaults teach half a million weights to copy in 250 steps.

    Attributes:
        steps: optimiser steps, which the schedule spans.
        batch_size: demonstrations per step.
        token_budget: most tokens of a micro-batch.
        optimizer: rates and schedule.
        fake_quant: whether keys are rounded as the caches will store them.
        balance_coef: weight of the sequence-level balance loss.
        indexer_coef: weight of the indexers' KL loss; 0 leaves the indexers untrained.
        indexer_over: what that loss ranks: each token's own selection (`sparse`), or all it could select
            (`dense`), from which an untrained indexer learns what it misses.
        draft: training of the drafter beside it.
    """

    steps: int = 250
    batch_size: int = 64
    token_budget: int = 8192
    optimizer: OptimizerConfig = field(default_factory=_optimizer)
    fake_quant: bool = False
    balance_coef: float = 0.0
    indexer_coef: float = 0.0
    draft: DraftConfig = field(default_factory=DraftConfig)
    indexer_over: Variant = "sparse"

    def __post_init__(self) -> None:
        require_at_least(self, 0, "steps", "balance_coef", "indexer_coef")
        require_at_least(self, 1, "batch_size", "token_budget")


class SFTTrainer(Trainer):
    """Trains a policy on samples, one optimiser step a call."""

    kind: ClassVar[str] = "sft"

    def __init__(self, policy: Policy, config: SFTConfig) -> None:
        super().__init__(
            policy,
            config.optimizer,
            total_steps=config.steps,
            token_budget=config.token_budget,
            fake_quant=config.fake_quant,
            balance_coef=config.balance_coef,
            indexer_coef=config.indexer_coef,
            draft=config.draft,
            indexer_over=config.indexer_over,
        )
        self.config = config

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Takes one step over all `samples`; the loss is divided by their trained tokens.

        Raises:
            ValueError: No sample has a token to learn from.
            NonFiniteLossError: The loss is not finite; the weights were not touched.
        """
        trained, total = sum(s.trained_tokens for s in samples), sum(len(s) for s in samples)
        if not trained:
            raise ValueError("no sample of this step has a token to learn from; give it demonstrations")
        self.policy.fake_quant = self.fake_quant
        device = self.policy.device
        loss_sum, correct = torch.zeros((), device=device), torch.zeros((), device=device)
        load, indexer = torch.zeros((), device=device), torch.zeros((), device=device)
        for batch in micro_batches(samples, self.token_budget, device):
            outputs = token_outputs(
                self.policy,
                batch,
                indexer_loss=self.indexer_loss,
                features=self.drafting is not None,
            )
            loss = -outputs.logprobs.sum() / trained
            self.require_finite(loss.detach(), [samples[i] for i in batch.indices], "loss")
            share = len(batch.token_ids) / total
            extra = self.auxiliary_loss(outputs.aux, len(batch.indices) / len(samples), share)
            (loss + extra).backward()
            self.teach_drafter(batch, outputs, share)
            loss_sum, correct = loss_sum + loss.detach(), correct + outputs.correct.sum()
            load = load + outputs.aux.expert_load.detach()
            if outputs.aux.indexer_loss is not None:
                indexer = indexer + share * outputs.aux.indexer_loss.detach()
        metrics = self.update(load)
        self.steps += 1
        metrics |= {"loss": loss_sum.item(), "accuracy": correct.item() / trained}
        metrics |= {"tokens": float(total), "tokens.trained": float(trained)}
        if self.indexer_coef:
            metrics["indexer"] = indexer.item()
        metrics |= {f"draft.{name}": value for name, value in self.update_drafter().items()}
        return {f"sft/{name}": value for name, value in metrics.items()}

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Loss and accuracy over `samples` without learning, as `sft/eval.loss` and `sft/eval.accuracy`."""
        self.policy.fake_quant = self.fake_quant
        loss, correct, trained = 0.0, 0, sum(s.trained_tokens for s in samples)
        for batch in micro_batches(samples, self.token_budget, self.policy.device):
            outputs = token_outputs(self.policy, batch)
            loss -= outputs.logprobs.sum().item()
            correct += int(outputs.correct.sum())
        return {"sft/eval.loss": loss / max(trained, 1), "sft/eval.accuracy": correct / max(trained, 1)}
