"""Supervised fine-tuning: the mean negative log-likelihood of the assistant's tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from model.layers.indexer_loss import Variant
from model.policies import AnyPolicy
from rl.trainers.base import Trainer, TrainerConfig
from rl.trainers.data import Sample
from rl.trainers.forward import token_outputs
from rl.trainers.optim import OptimizerConfig, require_at_least
from rl.trainers.ranks import ALONE, Ranks
from rl.trainers.shards import finish_forward


def _optimizer() -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=3e-3, muon_learning_rate=0.03, weight_decay=0.01, warmup_steps=50, decay="cosine"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig(TrainerConfig):
    """Settings of the warm start. The defaults teach half a million weights to copy in 250 steps.

    Attributes:
        batch_size: demonstrations per step.
        data: files of conversations or trajectories (.jsonl, .parquet, or a folder of `datasets`); none: the
            environment's own demonstrations.
        validation: such files, held out.
        validate_every: steps between validations; there is one after the last step, too.
        validation_samples: the first so many samples of them are used.
        effort: of conversations that name none; null renders none.
        max_tokens: longer samples of files are refused.
        cut: keep the beginning of samples that are too long, instead.
        min_score: trajectories in files with a lower score, or none, are passed over; null takes all.
        indexer_over: what the indexers' loss ranks: each token's own selection (`sparse`), or all it could
            select (`dense`), from which an untrained indexer learns what it misses.
    """

    steps: int = 250
    batch_size: int = 64
    data: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    validate_every: int = 50
    validation_samples: int = 256
    effort: int | None = None
    max_tokens: int | None = None
    cut: bool = False
    min_score: float | None = None
    optimizer: OptimizerConfig = field(default_factory=_optimizer)
    fake_quant: bool = False
    indexer_over: Variant = "sparse"

    def __post_init__(self) -> None:
        require_at_least(self, 0, "steps", "balance_coef", "indexer_coef")
        require_at_least(self, 1, "batch_size", "token_budget", "validate_every", "validation_samples")
        self._check_files()

    def _check_files(self) -> None:
        if self.max_tokens is not None:
            require_at_least(self, 2, "max_tokens")
        if self.effort is not None and not 1 <= self.effort <= 100:
            raise ValueError(f"effort={self.effort}: an effort is from 1 to 100")
        if self.cut and self.max_tokens is None:
            raise ValueError("cut=true has no effect without max_tokens; set both, or neither")
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise ValueError(f"min_score={self.min_score}: it is a finite number")
        for name, default in (("validate_every", 50), ("validation_samples", 256)):
            if not self.validation and getattr(self, name) != default:
                raise ValueError(f"{name} has no effect without sft.validation; set both, or neither")
        for name in ("effort", "max_tokens", "min_score"):
            if getattr(self, name) is not None and not (self.data or self.validation):
                raise ValueError(f"{name} is of samples from files and has no effect without sft.data")


class SFTTrainer(Trainer):
    """Trains a policy on samples, one optimiser step a call."""

    kind: ClassVar[str] = "sft"

    def __init__(self, policy: AnyPolicy, config: SFTConfig, *, ranks: Ranks = ALONE) -> None:
        super().__init__(policy, config, indexer_over=config.indexer_over, ranks=ranks)
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
        self.prepare()
        sums = Counter[str]()
        for batch in self.micro_batches(samples):
            outputs = token_outputs(
                self.policy,
                batch,
                indexer_loss=self.indexer_loss,
                features=self.drafting is not None,
            )
            loss = -outputs.logprobs.sum() / trained
            self.require_finite(loss.detach(), [samples[i] for i in batch.indices], "loss")
            share = 0.0 if batch.idle else len(batch.token_ids) / total
            documents = 0.0 if batch.idle else len(batch.indices) / len(samples)
            (loss + self.auxiliary_loss(outputs.aux, documents, share)).backward()
            self.teach_drafter(batch, outputs, share)
            if batch.idle:
                continue
            self.loads.add(outputs.aux)
            sums["loss"] += loss.item()  # pyright: ignore[reportArgumentType]
            sums["accuracy"] += int(outputs.correct.sum())
            if outputs.aux.indexer_loss is not None:
                sums["indexer"] += share * outputs.aux.indexer_loss.item()  # pyright: ignore
        metrics = self.update(*self.loads.total(self.ranks, self.policy.device))
        self.steps += 1
        metrics |= {name: self.ranks.sum(sums[name]) for name in ("loss", "accuracy")}
        metrics["accuracy"] /= trained
        metrics |= {"tokens": float(total), "tokens.trained": float(trained)}
        if self.indexer_coef:
            metrics["indexer"] = self.ranks.sum(sums["indexer"])
        metrics |= {f"draft.{name}": value for name, value in self.update_drafter().items()}
        return {f"sft/{name}": value for name, value in metrics.items()}

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Loss and accuracy over `samples` without learning, as `sft/eval.loss` and `sft/eval.accuracy`."""
        self.prepare()
        loss, correct, trained = 0.0, 0, sum(s.trained_tokens for s in samples)
        for batch in self.micro_batches(samples):
            outputs = token_outputs(self.policy, batch)
            loss -= outputs.logprobs.sum().item()
            correct += int(outputs.correct.sum())
        finish_forward(self.policy)
        loss, right = self.ranks.sum(loss), self.ranks.sum(correct)
        return {"sft/eval.loss": loss / max(trained, 1), "sft/eval.accuracy": right / max(trained, 1)}
