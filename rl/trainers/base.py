"""What the trainers share: one optimiser step, a balanced router, log-probabilities, a state to resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from model.config import PolicyConfig
from model.hf.settings import HFShape
from model.layers.indexer_loss import Variant
from model.policies import AnyPolicy
from model.policy import Policy, PolicyAux, PolicyOutput
from rl.trainers.data import Sample
from rl.trainers.draft import DraftConfig, DraftTrainer
from rl.trainers.forward import TokenOutputs, token_outputs
from rl.trainers.optim import Optimizer, OptimizerConfig
from rl.trainers.packing import MicroBatch, micro_batches
from rl.trainers.parallel_config import ParallelError
from rl.trainers.ranks import ALONE, Ranks
from rl.trainers.shards import finish_forward, gathered

_FORMAT = 1


class NonFiniteLossError(ArithmeticError):
    """The loss or a log-probability is not a number; the weights were not touched."""


class TrainerStateError(ValueError):
    """A stored trainer state that does not belong to this trainer."""


class Loads:
    """Tokens routed to each expert in one step, [layers, experts], of text and of images."""

    def __init__(self, config: PolicyConfig | HFShape) -> None:
        self._shape = (config.num_hidden_layers, config.n_routed_experts)
        self.clear()

    def clear(self) -> None:
        """Starts anew."""
        self._text = torch.zeros(self._shape)
        self._image: Tensor | None = None

    def add(self, aux: PolicyAux) -> None:
        """Adds a micro-batch."""
        self._text = self._text + aux.expert_load.detach().cpu()
        if aux.image_expert_load is not None:
            self._image = (0 if self._image is None else self._image) + aux.image_expert_load.detach().cpu()

    def total(self, ranks: Ranks, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Those of all ranks; starts anew."""
        text, image = ranks.total(self._text).to(device), None
        if ranks.any(self._image is not None):
            own = torch.zeros(self._shape) if self._image is None else self._image
            image = ranks.total(own).to(device)
        self.clear()
        return text, image


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """What every trainer is told.

    Attributes:
        steps: optimiser steps, which a decaying schedule spans.
        token_budget: most tokens of a micro-batch.
        optimizer: rates and schedule.
        fake_quant: whether keys are rounded as the sampler's caches store them.
        balance_coef: weight of the sequence-level balance loss.
        indexer_coef: weight of the indexers' KL loss; 0 leaves the indexers untrained.
        draft: training of the drafter beside it.
        recompute: activations of a layer are computed again in the backward pass and not kept (less memory,
            about a third more time).
    """

    steps: int
    token_budget: int = 8192
    optimizer: OptimizerConfig
    fake_quant: bool
    balance_coef: float = 0.0
    indexer_coef: float = 0.0
    draft: DraftConfig = field(default_factory=DraftConfig)
    recompute: bool = False


class Trainer:
    """A policy with its optimiser, schedule and counters. `version` counts the updates of the weights."""

    kind: ClassVar[str]

    def __init__(
        self,
        policy: AnyPolicy,
        config: TrainerConfig,
        *,
        temperature: float = 1.0,
        indexer_over: Variant = "sparse",
        ranks: Ranks = ALONE,
    ) -> None:
        self.policy, self.optimizer = policy, Optimizer(policy, config.optimizer, ranks=ranks)
        self.recompute, self.ranks = config.recompute, ranks
        self.total_steps, self.token_budget = config.steps, config.token_budget
        self.fake_quant, self.temperature = config.fake_quant, temperature
        self.balance_coef, self.indexer_coef = config.balance_coef, config.indexer_coef
        self.indexer_loss: bool | Variant = indexer_over if config.indexer_coef else False
        self.drafting: DraftTrainer | None = None
        if config.draft.anchors:
            if not isinstance(policy, Policy):
                raise ValueError("policy=hf has no drafter to train: set draft.anchors=0")
            self.drafting = DraftTrainer(
                policy,
                config.draft,
                total_steps=config.steps,
                token_budget=config.token_budget,
                temperature=temperature,
                ranks=ranks,
            )
        self.loads = Loads(policy.config)
        self.steps = 0
        self.version = 0

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities under the present weights, float32 [n] each, 0 where the token is not trained.

        They follow the sampler's definition: log softmax(logits / temperature), renormalised over a sample's
        sampling mask and with its choices where it has them, and keys are rounded when the trainer rounds
        them. With `policy.exact` they equal an exact sampler's to the last bit.
        """

        def logprobs(batch: MicroBatch) -> Tensor:
            return token_outputs(self.policy, batch, temperature=self.temperature).logprobs

        return self.per_token(samples, logprobs)

    @torch.no_grad()
    def per_token(
        self, samples: Sequence[Sample], compute: Callable[[MicroBatch], Tensor]
    ) -> list[np.ndarray]:
        """What `compute` says of the T tokens of a micro-batch, [n] for each sample, without learning."""
        own: dict[int, np.ndarray] = {}
        self.prepare()
        for batch in self.micro_batches(samples):
            values = compute(batch).cpu().numpy()
            if not batch.idle:
                own |= zip(batch.indices, np.split(values, batch.cu_seqlens[1:-1].tolist()), strict=True)
        finish_forward(self.policy)
        every = {index: values for part in self.ranks.gather(own) for index, values in part.items()}
        return [every[index] for index in range(len(samples))]

    def prepare(self) -> None:
        """Sets the policy up for a forward pass of this trainer."""
        self.policy.fake_quant = self.fake_quant
        self.policy.set_recompute(self.recompute)

    def micro_batches(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        """This rank's micro-batches of `samples`.

        Raises:
            ParallelError: Samples hold images and several processes train: the image tower is not divided.
        """
        if not self.ranks.alone and any(sample.images is not None for sample in samples):
            raise ParallelError(
                "samples with images are trained by one process so far: set trainer.parallel.data=1"
            )
        return micro_batches(samples, self.token_budget, self.policy.device, self.ranks)

    def auxiliary_loss(self, aux: PolicyAux, documents: float, tokens: float) -> Tensor | float:
        """Balance and indexer losses of a micro-batch with these shares of all documents and tokens."""
        loss: Tensor | float = 0.0
        if self.balance_coef:
            loss = loss + self.balance_coef * documents * aux.balance_loss
        if self.indexer_coef:
            assert aux.indexer_loss is not None
            loss = loss + self.indexer_coef * tokens * aux.indexer_loss
        return loss

    def teach_drafter(self, batch: MicroBatch, outputs: TokenOutputs | PolicyOutput, share: float) -> None:
        """Adds the drafter's gradients of a micro-batch that is `share` of the step, when it is trained."""
        if self.drafting is not None:
            assert outputs.features is not None
            with gathered(self.policy):
                self.drafting.accumulate(batch, outputs.hidden.detach(), outputs.features.detach(), share)

    def update_drafter(self) -> dict[str, float]:
        """Applies them; returns metrics by bare name, none when the drafter is not trained."""
        return {} if self.drafting is None else self.drafting.update()

    def update(self, expert_load: Tensor, image_load: Tensor | None = None) -> dict[str, float]:
        """Applies the accumulated gradients; returns the gradient norm and the learning rate."""
        fraction = self.optimizer.config.fraction(self.steps, self.total_steps)
        norm = self.optimizer.clip()
        self.optimizer.step(fraction)
        if self.optimizer.learning:
            self.policy.update_balance(expert_load, image_load)
        self.version += 1
        return {"grad_norm": norm, "lr": self.optimizer.config.learning_rate * fraction}

    def require_finite(self, values: Tensor, batch_samples: Sequence[Sample], what: str) -> None:
        """Stops before the weights are touched when a value is not finite."""
        names = "" if bool(values.isfinite().all()) else ", ".join(sample.id for sample in batch_samples[:8])
        found = [name for name in self.ranks.gather(names) if name]
        if found:
            self.discard()
            raise NonFiniteLossError(
                f"the {what} of a micro-batch of {len(batch_samples)} samples is not finite ({found[0]}); "
                "the weights were not touched. Look at these samples, or lower the learning rate"
            )

    def discard(self) -> None:
        """Forgets what was accumulated for a step."""
        self.optimizer.zero_grad()
        self.loads.clear()
        if self.drafting is not None:
            self.drafting.discard()

    def state_dict(self) -> dict[str, Any]:
        """All that continuing needs besides the weights: optimiser, schedule, counters, random state."""
        return {
            "format": _FORMAT,
            "kind": self.kind,
            "steps": self.steps,
            "version": self.version,
            "optimizer": self.optimizer.state_dict(),
            "draft": None if self.drafting is None else self.drafting.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`; the weights are loaded apart.

        Raises:
            TrainerStateError: The state is of another kind of trainer or another format.
            OptimizerError: It belongs to another policy or configuration.
        """
        found = (state.get("format"), state.get("kind"))
        if found != (_FORMAT, self.kind):
            raise TrainerStateError(
                f"the stored trainer state is of format {found[0]} and kind {found[1]!r}; this is a "
                f"{self.kind!r} trainer of format {_FORMAT}. Resume the stage that wrote the checkpoint"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        if (self.drafting is None) != (state["draft"] is None):
            raise TrainerStateError(
                f"the stored trainer {'trains no' if self.drafting else 'also trains a'} drafter, this one "
                "does the opposite: resume with the draft.anchors the checkpoint was written under"
            )
        if self.drafting is not None:
            self.drafting.load_state_dict(state["draft"])
        self.steps, self.version = int(state["steps"]), int(state["version"])
        torch.set_rng_state(state["rng"])
