"""On-policy distillation: the student follows, on its own samples, the teacher each is routed to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from model.policies import AnyPolicy
from model.policy import PolicyOutput
from rl.algorithms import AlgorithmConfig, LossInputs, objective
from rl.algorithms.linear import linear_logprobs, linear_reverse_kl
from rl.algorithms.opd import sampled_advantages
from rl.trainers.base import Trainer, TrainerConfig
from rl.trainers.forward import packed_tokens
from rl.trainers.optim import OptimizerConfig, require_at_least
from rl.trainers.packing import MicroBatch
from rl.trainers.ranks import ALONE, Ranks
from rl.trainers.teachers import TaughtSample, Teachers

_SAMPLED = AlgorithmConfig(corrections=())


def _optimizer() -> OptimizerConfig:
    return OptimizerConfig(learning_rate=3e-4, warmup_steps=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """One teacher, and the samples it is chosen for.

    Attributes:
        path: a run (its newest checkpoint), `RUN@STEP`, or a policy's folder. Of any width, with the
            student's tokenizer.
        envs: environments, by their names in the run, whose samples it teaches.
        tasks: patterns of task ids (`calc/9*`) that it teaches, before any teacher chosen by environment.
            With neither, it teaches what no other does.
        weight: of its samples in the loss.
    """

    path: str
    envs: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("a teacher needs a path: a run, RUN@STEP, or the folder of a policy")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"the weight of teacher {self.path} is {self.weight}; it is 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class OPDConfig(TrainerConfig):
    """Settings of the distillation. With `teachers`, a run distils where it would reinforce.

    Attributes:
        teachers: by a name of your choice; they and their weights can be changed while the run is going
            (`distillation.yaml` in its folder).
        objective: `exact` reverse KL over the vocabulary, or `sampled`: its one-token estimate as advantage.
        store: where the teachers' hidden states wait for the loss: `memory`, or files of the run (`disk`).
        temperature: the sampler's.
    """

    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    steps: int = 100
    objective: Literal["exact", "sampled"] = "exact"
    store: Literal["memory", "disk"] = "memory"
    temperature: float = 1.0
    optimizer: OptimizerConfig = field(default_factory=_optimizer)
    fake_quant: bool = True

    def __post_init__(self) -> None:
        if self.objective not in ("exact", "sampled"):
            raise ValueError(f"objective is {self.objective!r}; it is 'exact' or 'sampled'")
        if self.store not in ("memory", "disk"):
            raise ValueError(f"store is {self.store!r}; it is 'memory' or 'disk'")
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; samples to learn from are drawn above 0")
        require_at_least(self, 1, "steps", "token_budget")
        require_at_least(self, 0, "balance_coef", "indexer_coef")


class OPDTrainer(Trainer):
    """Trains a student on taught samples, one optimiser step a call."""

    kind: ClassVar[str] = "opd"

    def __init__(
        self,
        policy: AnyPolicy,
        config: OPDConfig,
        teachers: Teachers,
        weights: Mapping[str, float] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(policy, config, temperature=config.temperature, ranks=ranks)
        self.config, self.teachers = config, teachers
        self.weights = dict(weights or {})
        """Weight of each teacher's samples; 1 where not named."""

    def step(self, taught: Sequence[TaughtSample]) -> dict[str, float]:
        """Takes one step; the loss is the mean over all trained tokens, each times its teacher's weight.

        The batch is sorted by teacher, so that each head is fetched once and one is resident at a time.

        Raises:
            ValueError: There is nothing to learn from.
            TeacherError: The teacher of a sample is no longer active.
            NonFiniteLossError: The loss is not finite; the weights were not touched.
        """
        tokens = sum(len(item.sample) for item in taught)
        trained = sum(item.sample.trained_tokens for item in taught)
        if not trained:
            raise ValueError("no sample of this step has a token to learn from; give it sampled trajectories")
        self.prepare()
        sums: Counter[str] = Counter()
        for name, items, micro in self._by_teacher(taught):
            output = self.policy(
                packed_tokens(self.policy, micro),
                indexer_loss=self.indexer_loss,
                features=self.drafting is not None,
            )
            loss, values = self._loss(name, items, micro, output)
            loss = self.weights.get(name, 1.0) * loss / trained
            self.require_finite(loss.detach(), [item.sample for item in items], "loss")
            share = 0.0 if micro.idle else len(micro.token_ids) / tokens
            documents = 0.0 if micro.idle else len(items) / len(taught)
            (loss + self.auxiliary_loss(output.aux, documents, share)).backward()
            self.teach_drafter(micro, output, share)
            if not micro.idle:
                self.loads.add(output.aux)
            sums.update({"loss": loss.item(), f"kl.{name}": values.sum().item()})
        updated = self.update(*self.loads.total(self.ranks, self.policy.device))
        self.steps += 1
        updated |= {f"draft.{name}": value for name, value in self.update_drafter().items()}
        return {f"opd/{key}": value for key, value in (self._summary(sums, taught) | updated).items()}

    def _by_teacher(
        self, taught: Sequence[TaughtSample]
    ) -> Iterator[tuple[str, list[TaughtSample], MicroBatch]]:
        for name in sorted({item.teacher for item in taught}):
            items = [item for item in taught if item.teacher == name]
            for micro in self.micro_batches([item.sample for item in items]):
                yield name, [items[i] for i in micro.indices], micro

    def _loss(
        self, name: str, items: Sequence[TaughtSample], micro: MicroBatch, output: PolicyOutput
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of a micro-batch, and its reverse KL (exact, or its estimate) per trained token."""
        positions = micro.loss_mask.nonzero()[:, 0]
        hidden, labels = output.hidden[positions - 1], micro.token_ids[positions]
        own, head = self.policy.head.weight, self.teachers.head(name).to(hidden.device)
        theirs = _states(items, micro, head.shape[1]).to(hidden.device)
        assert isinstance(own, Tensor)
        if self.config.objective == "exact":
            kl = linear_reverse_kl(hidden, own, theirs, head, temperature=self.temperature)
            return kl.sum(), kl.detach()
        temperature = self.temperature
        logprobs, _, _ = linear_logprobs(hidden, own, labels, temperature=temperature)
        taught, _, _ = linear_logprobs(theirs, head, labels, temperature=temperature)
        everywhere = torch.ones_like(labels, dtype=torch.bool)
        advantages = sampled_advantages(taught, logprobs, everywhere)
        sampler = micro.logprobs[positions]
        inputs = LossInputs(
            logprobs=logprobs,
            sampler_logprobs=sampler,
            old_logprobs=sampler,
            advantages=advantages,
            mask=everywhere,
            versions=micro.versions[positions],
            segment_ids=micro.segment_ids[positions],
            segments=len(items),
            current_version=self.version,
        )
        ones = torch.ones(len(items), device=hidden.device)
        return objective(_SAMPLED, inputs, ones).loss, -advantages

    def _summary(self, sums: Mapping[str, float], taught: Sequence[TaughtSample]) -> dict[str, float]:
        counts: Counter[str] = Counter()
        for item in taught:
            counts[item.teacher] += item.sample.trained_tokens
        kl = {name: self.ranks.sum(sums[f"kl.{name}"]) for name in sorted(counts)}
        trained = counts.total()
        return {
            "loss": self.ranks.sum(sums["loss"]),
            "kl": sum(kl.values()) / trained,
            "tokens.trained": float(trained),
            **{f"kl.{name}": value / max(counts[name], 1) for name, value in kl.items()},
        }


def _states(items: Sequence[TaughtSample], micro: MicroBatch, width: int) -> Tensor:
    """The teacher's hidden states at the trained tokens of a micro-batch, [m, width]; idle ones have none."""
    if micro.idle:
        return torch.zeros(0, width)
    states: list[np.ndarray] = []
    for item in items:
        assert item.hidden is not None, "a process is taught the samples of its own micro-batches"
        states.append(item.hidden)
    return torch.from_numpy(np.concatenate(states))
