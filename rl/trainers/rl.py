"""Reinforcement learning: groups of trajectories in, one optimiser step out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from envs.types import Group
from model.diagnostics.scales import ScaleMonitor
from model.policies import AnyPolicy
from model.policy import Policy
from rl.algorithms import AlgorithmConfig, LossInputs, objective
from rl.algorithms.advantages.registry import ADVANTAGES
from rl.algorithms.entropy import next_coefficient, target_at
from rl.algorithms.registry import settings_of
from rl.trainers.base import Trainer, TrainerConfig, TrainerStateError
from rl.trainers.batch import Batch, build_batch
from rl.trainers.choices import ReplayChoices
from rl.trainers.classes import ClassGaps
from rl.trainers.critic import Critic, CriticConfig, Estimates, estimate
from rl.trainers.forward import TokenOutputs, token_outputs
from rl.trainers.measure import Measures
from rl.trainers.optim import OptimizerConfig, require_at_least
from rl.trainers.packing import MicroBatch
from rl.trainers.parallel_config import ParallelConfig
from rl.trainers.ranks import ALONE, Ranks


def _optimizer() -> OptimizerConfig:
    return OptimizerConfig(learning_rate=3e-4, warmup_steps=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RLConfig(TrainerConfig):
    """Settings of the RL trainer.

    Attributes:
        max_tokens: longer samples are cut here; None cuts none.
        temperature: the sampler's; log-probabilities are those of softmax(logits / temperature).
        scales_every: steps between counts of block scales at their limits (`quant/train/...`); 0: never.
        parallel: how many processes train the policy together, in SFT too.
        critic: the value model, with advantage=gae.
        replay_choices: which of the sampler's choices the engine records and the forward pass repeats: none
            (off), expert ids (experts), or also the keys that attention selected (selections, which takes
            some hundred numbers a token and layer).
    """

    steps: int = 200
    max_tokens: int | None = None
    temperature: float = 1.0
    optimizer: OptimizerConfig = field(default_factory=_optimizer)
    fake_quant: bool = True
    scales_every: int = 10
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    replay_choices: ReplayChoices = "experts"

    def __post_init__(self) -> None:
        require_at_least(self, 0, "steps", "balance_coef", "indexer_coef", "scales_every")
        require_at_least(self, 1, "token_budget")
        if self.max_tokens is not None:
            require_at_least(self, 2, "max_tokens")
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; samples to learn from are drawn above 0")


class RLTrainer(Trainer):
    """Trains a policy on groups of trajectories.

    Args:
        policy: what is trained.
        config: the trainer's settings.
        algorithm: advantages, loss and corrections.
        reference: the policy that a KL term pulls towards; needed with `kl_coef`.
    """

    kind: ClassVar[str] = "rl"

    def __init__(
        self,
        policy: AnyPolicy,
        config: RLConfig,
        algorithm: AlgorithmConfig,
        *,
        reference: AnyPolicy | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(policy, config, temperature=config.temperature, ranks=ranks)
        if algorithm.needs_reference != (reference is not None):
            raise ValueError(
                "a KL term needs a reference policy, and without one a reference has no effect: "
                f"kl_coef is {algorithm.kl_coef}, the reference is {'given' if reference else 'missing'}"
            )
        self.config, self.algorithm, self.reference = config, algorithm, reference
        self.critic: Critic | None = None
        if algorithm.needs_critic:
            self.critic = Critic(policy.config.hidden_size, config.critic, ranks=ranks).to(policy.device)
        elif config.critic != CriticConfig():
            raise ValueError(
                f"trainer.critic has no effect with advantage {algorithm.advantage!r}; set algorithm=ppo, or "
                "leave it out"
            )
        self._estimates: list[Estimates] = []
        self.recovered_groups = 0
        self.entropy_coef = algorithm.entropy_coef
        """Groups numbered below began in an earlier attempt at the run, partly under weights now lost."""

    def step(self, groups: Sequence[Group], *, min_version: int = 0) -> dict[str, float]:
        """Takes one optimiser step over `groups`; takes none, and says so, when there is nothing to learn.

        Either way the weights' version rises by one: it names the step that published them. Tokens that a
        version below `min_version` sampled carry no loss.

        Groups whose advantages are all zero are left out of the forward pass (they count in the denominator),
        unless a KL or entropy term learns from them too.

        Raises:
            NonFiniteAdvantageError: A reward or advantage is not a number.
            NonFiniteLossError: A log-probability or the loss is not finite; the weights were not touched.
        """
        batch = build_batch(
            groups,
            self.algorithm,
            max_tokens=self.config.max_tokens,
            version=self.version,
            min_version=min_version,
            recovered_groups=self.recovered_groups,
            replay=self.config.replay_choices,
        )
        measures, classes = Measures(), ClassGaps(self.recovered_groups)
        updated: dict[str, float] = {}
        scales: dict[str, float] = {}
        if batch.samples:
            self.prepare()
            if self.critic is not None:
                batch = self._valued(batch)
            scales = self._accumulate_and_count(batch, measures, classes)
            updated = self.update(*self.loads.total(self.ranks, self.policy.device))
            if self.critic is not None:
                critic = self.critic.update(sum(sample.trained_tokens for sample in batch.samples))
                updated |= {f"value.{name}": value for name, value in critic.items()}
        measured = measures.summary(self.ranks)
        steered = self._steer_entropy(measured.get("entropy"))
        self.steps += 1
        self.version = self.steps
        metrics = {
            **_dropped(batch.dropped),
            **measured,
            **steered,
            **classes.summary(self.ranks),
            **updated,
            **batch.statistics(),
        }
        metrics["updates"] = float(bool(batch.samples))
        drafted = {f"draft/{name}": value for name, value in self.update_drafter().items()}
        return {f"train/{name}": value for name, value in metrics.items()} | scales | drafted

    def _steer_entropy(self, entropy: float | None) -> dict[str, float]:
        """Moves the entropy bonus's weight for the next step; a step without tokens (None) moves nothing."""
        algorithm = self.algorithm
        if not algorithm.entropy_target:
            return {}
        target = target_at(
            algorithm.entropy_target, self.steps, self.config.steps, algorithm.entropy_decay_from
        )
        used = self.entropy_coef
        if entropy is not None:
            self.entropy_coef = next_coefficient(
                used, entropy, target, rate=algorithm.entropy_rate, limit=algorithm.entropy_limit
            )
        return {"entropy.coef": used, "entropy.target": target}

    def _valued(self, batch: Batch) -> Batch:
        """The batch with an advantage for each token, and what the critic is to learn from it."""
        assert self.critic is not None
        estimator = ADVANTAGES.load(self.algorithm.advantage)
        chosen = settings_of(estimator) | self.algorithm.settings_for(estimator)
        values = self.per_token(batch.samples, self._values)
        samples, self._estimates = estimate(
            batch.samples,
            values,
            gamma=chosen["gae_gamma"],
            lam=chosen["gae_lambda"],
            whiten=chosen["gae_whiten"],
        )
        return replace(batch, samples=samples)

    def _values(self, micro: MicroBatch) -> Tensor:
        assert self.critic is not None
        outputs = token_outputs(self.policy, micro, temperature=self.temperature)
        return self.critic.values(outputs.hidden, micro.loss_mask)

    def _accumulate_and_count(self, batch: Batch, measures: Measures, classes: ClassGaps) -> dict[str, float]:
        """`_accumulate`, and in every `scales_every`-th step what the forward passes rounded."""
        if not self.config.scales_every or self.steps % self.config.scales_every:
            self._accumulate(batch, measures, classes)
            return {}
        if not isinstance(self.policy, Policy):
            raise ValueError("policy=hf stores no block scales to count: set trainer.scales_every=0")
        with ScaleMonitor(self.policy) as monitor:
            self._accumulate(batch, measures, classes)
            return monitor.metrics("train")

    def _accumulate(self, batch: Batch, measures: Measures, classes: ClassGaps) -> None:
        """Adds up the gradients over the micro-batches."""
        device, samples = self.policy.device, batch.samples
        weights = torch.from_numpy(batch.weights).to(device=device, dtype=torch.float32)
        tokens = sum(len(sample) for sample in samples)
        for micro in self.micro_batches(samples):
            members = [samples[i] for i in micro.indices]
            outputs = token_outputs(
                self.policy,
                micro,
                temperature=self.temperature,
                indexer_loss=self.indexer_loss,
                features=self.drafting is not None,
            )
            inputs = self._inputs(micro, outputs)
            self.require_finite(inputs.masked(inputs.sampler_logprobs), members, "sampler's log-probability")
            shares = weights[list(micro.indices)]
            part = objective(self.algorithm, inputs, shares, entropy_coef=self.entropy_coef)
            self.require_finite(part.loss.detach(), members, "loss")
            share = 0.0 if micro.idle else len(micro.token_ids) / tokens
            documents = 0.0 if micro.idle else len(members) / len(samples)
            (part.loss + self.auxiliary_loss(outputs.aux, documents, share)).backward()
            self.teach_drafter(micro, outputs, share)
            if self.critic is not None and not micro.idle:
                estimates = [self._estimates[i] for i in micro.indices]
                trained = sum(sample.trained_tokens for sample in samples)
                self.critic.accumulate(outputs.hidden, micro, estimates, trained)
            measures.add(inputs, part, batch.fresh[list(micro.indices)])
            if not micro.idle:
                classes.add(inputs, members)
                self.loads.add(outputs.aux)

    def discard(self) -> None:
        """Forgets the accumulated gradients, the critic's too."""
        super().discard()
        if self.critic is not None:
            self.critic.discard()

    def state_dict(self) -> dict[str, Any]:
        """As every trainer's, and the critic and the entropy bonus's weight."""
        critic = None if self.critic is None else self.critic.state_dict()
        return super().state_dict() | {"critic": critic, "entropy_coef": self.entropy_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`.

        Raises:
            TrainerStateError: The state has a critic and this trainer none, or the other way round.
        """
        stored = state.get("critic")
        if (stored is None) != (self.critic is None):
            raise TrainerStateError(
                f"the stored trainer has {'no' if stored is None else 'a'} critic, this one "
                f"{'none' if self.critic is None else 'needs one'}: resume with the algorithm.advantage the "
                "checkpoint was written under"
            )
        super().load_state_dict(state)
        if self.critic is not None:
            self.critic.load_state_dict(stored)  # pyright: ignore[reportArgumentType]
        if self.algorithm.entropy_target and "entropy_coef" in state:  # older states were written without one
            self.entropy_coef = min(state["entropy_coef"], self.algorithm.entropy_limit)

    def _inputs(self, micro: MicroBatch, outputs: TokenOutputs) -> LossInputs:
        old = outputs.logprobs.detach() if self.algorithm.anchored_at_trainer else micro.logprobs
        reference = None
        if self.reference is not None:
            self.reference.fake_quant = self.fake_quant
            with torch.no_grad():
                reference = token_outputs(self.reference, micro, temperature=self.temperature).logprobs
        return LossInputs(
            logprobs=outputs.logprobs,
            sampler_logprobs=micro.logprobs,
            old_logprobs=old,
            advantages=micro.advantages,
            mask=micro.loss_mask,
            versions=micro.versions,
            segment_ids=micro.segment_ids,
            segments=len(micro.indices),
            current_version=self.version,
            reference_logprobs=reference,
            entropy=outputs.entropy,
        )


def _dropped(dropped: Counter[str]) -> dict[str, float]:
    reasons = {"missing", "zero_advantage", "empty", *dropped}
    return {f"groups.dropped.{reason}": float(dropped[reason]) for reason in sorted(reasons)}
