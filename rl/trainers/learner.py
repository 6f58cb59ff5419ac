"""The trainer's process: one policy that first imitates and is then reinforced, and its checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from envs.types import Trajectory
from model.checkpoint import save_policy
from rl import build
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.environments import demonstrations
from rl.launch.config import RunConfig
from rl.publish import outbox
from rl.rollout.buffer import Batch
from rl.trainers.base import Trainer
from rl.trainers.data import Sample, trajectory_samples
from rl.trainers.distiller import Distiller, Lesson
from rl.trainers.rl import RLTrainer
from rl.trainers.sft import SFTTrainer


class Learner:
    """Owns the policy's master weights and both trainers. Its methods are not called concurrently."""

    def __init__(self, config: RunConfig, checkpoints: Path) -> None:
        build.use_threads(config.launcher.sft_threads)
        self._config = config
        self._store = CheckpointStore(checkpoints, config.checkpoint.keep, config.checkpoint.keep_every)
        self._chat = build.chat_format(config)
        self.policy = build.policy(config)
        self.sft = SFTTrainer(self.policy, config.sft)
        self.rl: RLTrainer | None = None
        self.opd: Distiller | None = None
        self.outbox = outbox(config.launcher.weights, self.weights)
        self._demonstrations = demonstrations(config, self._chat)

    def warm_start(self, steps: int) -> dict[str, float]:
        """Takes so many steps of SFT and returns the metrics of the last one."""
        metrics: dict[str, float] = {}
        for _ in range(steps):
            metrics = self.sft.step(list(islice(self._demonstrations, self._config.sft.batch_size)))
        return metrics

    def begin_learning(self) -> None:
        """Switches to RL or distillation: quantised caches are simulated from now on, by a new optimiser."""
        build.use_threads(self._config.launcher.trainer_threads)
        self.policy.fake_quant = self._config.trainer.fake_quant
        self.policy.exact = self._config.model.exact
        if self._config.opd.teachers:
            self.opd = Distiller(self.policy, self._config.opd, self._store.folder.parent / "hidden_states")
        else:
            self.rl = RLTrainer(self.policy, self._config.trainer, self._config.algorithm)

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
        """Returns the current weights, and the version that the next samples carry."""
        trainer = self._learning
        return self.policy.state_dict(), 0 if trainer is None else trainer.version

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
            "policy": dict(self.policy.state_dict()),
            "sft": self.sft.state_dict(),
            "learning": None if self._learning is None else self._learning.state_dict(),
        }
        self._store.save(
            step,
            {"learner": own, "controller": dict(state)},
            self._write_policy,
        )

    def restore(self, checkpoint: Checkpoint) -> Any:
        """Restores what `save` wrote and returns the controller's state."""
        state = checkpoint.load_state()
        own = state["learner"]
        self.policy.load_state_dict(own["policy"])
        self.sft.load_state_dict(own["sft"])
        seen = self.sft.steps * self._config.sft.batch_size
        self._demonstrations = islice(self._demonstrations, seen, None)
        if own["learning"] is not None:
            self.begin_learning()
            assert self._learning is not None
            self._learning.load_state_dict(own["learning"])
        return state["controller"]

    def recovered(self, groups: int) -> None:
        """Notes that groups with a number below `groups` began in an earlier attempt at this run.

        They may hold tokens of weights that were lost with it: they are trained on as ever, but never used to
        compare trainer and sampler.
        """
        if self.rl is not None:
            self.rl.recovered_groups = groups

    def _write_policy(self, folder: Path) -> None:
        save_policy(self.policy, folder, chat=self._chat)


@asynccontextmanager
async def open_learner(config: RunConfig, checkpoints: Path) -> AsyncIterator[Learner]:
    """Opens the trainer's process."""
    yield Learner(config, checkpoints)


def _pure(sample: Sample, version: int) -> bool:
    return bool((sample.policy_version[sample.loss_mask] == version).all())
