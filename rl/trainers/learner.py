"""The trainer's process: one policy that first imitates and is then reinforced, and its checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from envs.types import Trajectory
from model.hf.policy import HFPolicy
from model.hf.weights import published
from model.policies import AnyPolicy, write_policy
from rl import build
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.launch.config import RunConfig
from rl.publish import outbox
from rl.rollout.buffer import Batch
from rl.trainers.base import Trainer, TrainerStateError
from rl.trainers.data import Sample, trajectory_samples
from rl.trainers.demonstrations import Demonstrations
from rl.trainers.distiller import Distiller, Lesson
from rl.trainers.ranks import ALONE, Ranks
from rl.trainers.rl import RLTrainer
from rl.trainers.sft import SFTTrainer


def frozen_copy(policy: AnyPolicy) -> AnyPolicy:
    """A policy with the present weights of its own, which nobody trains."""
    copy = deepcopy(policy).requires_grad_(False)
    copy.zero_grad(set_to_none=True)
    return copy


class Learner:
    """Owns the policy's master weights and both trainers. Its methods are not called concurrently."""

    def __init__(self, config: RunConfig, checkpoints: Path, ranks: Ranks = ALONE) -> None:
        build.use_threads(config.launcher.sft_threads)
        self._config, self._ranks = config, ranks
        self._store = CheckpointStore(checkpoints, config.checkpoint.keep, config.checkpoint.keep_every)
        self._chat = build.chat_format(config)
        self.policy = build.policy(config).to(config.trainer_device)
        if not ranks.alone:
            from rl.trainers.parallel import spread  # torch.distributed takes half a second to import

            spread(self.policy, config.trainer.parallel)
        self.sft = SFTTrainer(self.policy, config.sft, ranks=ranks)
        self.rl: RLTrainer | None = None
        self.opd: Distiller | None = None
        self.outbox = outbox(config.launcher.weights, self.weights)
        self._data = Demonstrations(config, self._chat, self.policy.config)

    def warm_start(self, steps: int) -> dict[str, float]:
        """Takes so many steps of SFT; returns the metrics of the last one, and of a validation among them."""
        metrics: dict[str, float] = {}
        for _ in range(steps):
            metrics |= self.sft.step(self._data.take(self._config.sft.batch_size))
            if self._data.validates_at(self.sft.steps):
                metrics |= self.sft.evaluate(self._data.validation)
        return metrics | self._data.metrics()

    def begin_learning(self) -> None:
        """Switches to RL or distillation: quantised caches are simulated from now on, by a new optimiser."""
        build.use_threads(self._config.launcher.trainer_threads)
        self.policy.fake_quant = self._config.trainer.fake_quant
        self.policy.exact = self._config.exactness.on
        if self._config.opd.teachers:
            states = self._store.folder.parent / "hidden_states"
            self.opd = Distiller(self.policy, self._config.opd, states, self._ranks)
        else:
            config = self._config
            reference = frozen_copy(self.policy) if config.algorithm.needs_reference else None
            settings = replace(config.trainer, replay_choices=config.replay_choices)
            self.rl = RLTrainer(
                self.policy, settings, config.algorithm, reference=reference, ranks=self._ranks
            )

    @property
    def _learning(self) -> Trainer | None:
        """The trainer of the present stage; None while it imitates."""
        return self.rl if self.opd is None else self.opd.trainer

    def step(self, batch: Batch) -> dict[str, float]:
        """Takes one step of RL on a batch of groups and returns its metrics."""
        assert self.rl is not None, "begin_learning comes before the first step"
        assert batch.version == self.rl.version, "the controller counts the same steps"
        return self.rl.step(batch.groups, min_version=batch.min_version)

    def distil(
        self,
        batch: Batch,
        lessons: Sequence[Lesson],
        folders: Mapping[str, str],
        weights: Mapping[str, float],
    ) -> dict[str, float]:
        """Takes one step of distillation on groups with their lessons, and returns its metrics.

        `folders` and `weights` are those of all active teachers, by name.
        """
        assert self.opd is not None, "begin_learning comes before the first step"
        assert batch.version == self.opd.trainer.version, "the controller counts the same steps"
        self.opd.use(folders, weights)
        return self.opd.step(batch.groups, lessons, batch.min_version)

    def weights(self) -> tuple[Mapping[str, Tensor], int]:
        """Returns the current weights (nothing beside rank 0), and the version of the next samples."""
        tensors = self._own_weights() if self._ranks.alone else self._whole_policy()
        return tensors, 0 if self._learning is None else self._learning.version

    def _own_weights(self) -> Mapping[str, Tensor]:
        """The weights as the engine names them: ours by their own names, any other as in files."""
        if self._config.engine.name != "native" and isinstance(self.policy, HFPolicy):
            return published(self.policy)
        return self.policy.state_dict()

    def _whole_policy(self) -> dict[str, Tensor]:
        """The weights in host memory, gathered tensor by tensor (collective); nothing beside rank 0."""
        from rl.trainers.parallel import full_state

        first = self._ranks.rank == 0
        return {name: tensor.cpu() for name, tensor in full_state(self.policy) if first}

    def mismatch(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Compares the sampler's log-probabilities with the trainer's, token by token, on equal weights.

        Tokens that another version sampled are left out. Returns median, mean and maximum of the absolute
        difference, the share above 1e-3, and the number of tokens.
        """
        trainer = self._learning
        assert trainer is not None
        version = trainer.version
        samples = [s for t in trajectories for s in trajectory_samples(t, 0.0) if _pure(s, version)]
        own = trainer.logprobs(samples)
        gaps = [np.abs(a - s.logprobs)[s.loss_mask] for a, s in zip(own, samples, strict=True)]
        gap = np.concatenate(gaps) if gaps else np.zeros(0, np.float32)
        if not gap.size:
            return {"n": 0.0}
        return {
            "n": float(gap.size),
            "median": float(np.median(gap)),
            "mean": float(gap.mean()),
            "max": float(gap.max()),
            "share_over_1e-3": float((gap > 1e-3).mean()),
        }

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint of policy, trainers and the controller's `state`."""
        own = {
            "sft": self.sft.state_dict(),
            "learning": None if self._learning is None else self._learning.state_dict(),
            "data": self._data.state_dict(),
        }
        if self._ranks.alone:
            own["policy"] = dict(self.policy.state_dict())
            if self.rl is not None and self.rl.reference is not None:
                own["reference"] = dict(self.rl.reference.state_dict())
            self._store.save(step, {"learner": own, "controller": dict(state)}, self._write_policy)
        else:
            self._save_together(step, own, dict(state))

    def _save_together(self, step: int, own: dict[str, Any], state: dict[str, Any]) -> None:
        """Every rank writes its part of policy and optimisers; rank 0 all else, and the published policy."""
        from rl.trainers import sharded
        from rl.trainers.parallel import host_policy

        tree = {"policy": dict(self.policy.state_dict()), **sharded.take_optimizers(own)}
        tensors = self._whole_policy()

        def write(folder: Path) -> None:
            place = self._ranks.from_first(folder.parent / sharded.FOLDER)
            sharded.save(place, tree, self.policy, self._ranks)

        if self._ranks.rank:
            write(Path())
            return

        def write_all(folder: Path) -> None:
            write_policy(host_policy(self.policy, tensors), folder, self._chat)
            write(folder)

        self._store.save(step, {"learner": own, "controller": state}, write_all)

    def restore(self, checkpoint: Checkpoint) -> Any:
        """Restores what `save` wrote, by whatever number of processes; returns the controller's state."""
        state = checkpoint.load_state()
        own = state["learner"]
        if self._ranks.alone and "policy" in own:
            self.policy.load_state_dict(own["policy"])
        else:
            own = self._restore_parts(checkpoint, own)
        self.sft.load_state_dict(own["sft"])
        self._data.load_state_dict(own.get("data", {}), self.sft.steps * self._config.sft.batch_size)
        if own["learning"] is not None:
            self.begin_learning()
            assert self._learning is not None
            self._learning.load_state_dict(own["learning"])
            self._restore_reference(own)
        return state["controller"]

    def _restore_reference(self, own: Mapping[str, Any]) -> None:
        """A KL term keeps pulling to the policy that RL began with, not to the one it resumes with."""
        if self.rl is None or self.rl.reference is None:
            return
        if "reference" not in own:
            raise TrainerStateError(
                "algorithm.kl_coef needs the policy that RL began with, and the checkpoint was written "
                "without a KL term, which keeps none: resume without it, or begin a run with "
                "model.path=<the checkpoint>"
            )
        self.rl.reference.load_state_dict(own["reference"])

    def _restore_parts(self, checkpoint: Checkpoint, own: dict[str, Any]) -> dict[str, Any]:
        """Loads the policy from or into several processes; returns the trainers' states laid out likewise."""
        from rl.trainers import sharded
        from rl.trainers.experts import split_stacks
        from rl.trainers.parallel import load_parts

        if (folder := checkpoint.path / sharded.FOLDER).exists():
            tree = sharded.load(folder, self.policy, self._ranks)
            own["policy"] = tree.pop("policy")
            sharded.put_optimizers(own, tree)
        else:
            own = split_stacks(own, self.policy.config.n_routed_experts)
        load_parts(self.policy, own["policy"])
        return own

    def recovered(self, groups: int) -> None:
        """Notes that groups with a number below `groups` began in an earlier attempt at this run.

        They may hold tokens of weights that were lost with it: they are trained on as ever, but never used to
        compare trainer and sampler.
        """
        if self.rl is not None:
            self.rl.recovered_groups = groups

    def _write_policy(self, folder: Path) -> None:
        write_policy(self.policy, folder, self._chat)


@asynccontextmanager
async def open_learner(config: RunConfig, checkpoints: Path) -> AsyncIterator[Any]:
    """Opens the trainer's process, or processes."""
    if config.trainer.parallel.data == 1:
        yield Learner(config, checkpoints)
        return
    from rl.trainers.rank_process import LearnerGroup

    group = LearnerGroup(config, checkpoints)
    try:
        yield group
    finally:
        group.close()


def _pure(sample: Sample, version: int) -> bool:
    return bool((sample.policy_version[sample.loss_mask] == version).all())
