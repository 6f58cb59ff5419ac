"""Distillation in the trainer's process: each group is taught by its teacher, then a step is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from envs.types import Group, Trajectory
from model.policies import AnyPolicy, open_policy
from rl.trainers.data import Sample, trajectory_samples
from rl.trainers.hidden_store import HiddenStore
from rl.trainers.opd import OPDConfig, OPDTrainer
from rl.trainers.ranks import ALONE, Ranks
from rl.trainers.teachers import Teachers


@dataclass(frozen=True, slots=True)
class Lesson:
    """Who teaches a group, and the version of the configuration under which the group began."""

    teacher: str
    config_version: int


class Distiller:
    """A student with its teachers. Only teachers that samples need are loaded.

    Args:
        policy: the student.
        config: the trainer's settings.
        store: a folder for hidden states, used with `store=disk`; each process has one of its own in it.
        ranks: the processes that train together.
    """

    def __init__(self, policy: AnyPolicy, config: OPDConfig, store: Path, ranks: Ranks = ALONE) -> None:
        teachers = Teachers(
            policy.config.vocab_size,
            token_budget=config.token_budget,
            fake_quant=config.fake_quant,
            store=HiddenStore(store / f"rank-{ranks.rank}" if config.store == "disk" else None),
            vision=policy.config.vision,
            ranks=ranks,
        )
        self.trainer = OPDTrainer(policy, config, teachers, ranks=ranks)
        self._active: dict[str, str] = {}

    def use(self, teachers: Mapping[str, str], weights: Mapping[str, float]) -> None:
        """Makes these teachers active: by name their policies' folders, and their samples' weights.

        Others are let go. One that stays under its name and folder stays loaded.
        """
        registry = self.trainer.teachers
        for name in self._active.keys() - teachers.keys():
            registry.remove(name)
        for name, folder in teachers.items():
            if self._active.get(name) != folder:
                registry.add(name, partial(open_policy, Path(folder)))
        self._active, self.trainer.weights = dict(teachers), dict(weights)

    def step(self, groups: Sequence[Group], lessons: Sequence[Lesson], min_version: int) -> dict[str, float]:
        """Teaches the groups' samples and takes one optimiser step.

        Samples are learned from whatever their score, also without one: a teacher's word is all that counts.
        Tokens of versions below `min_version` are not trained.

        Raises:
            ValueError: There is nothing to learn from.
            TeacherError: A lesson names a teacher that is not active, or one with another vocabulary.
        """
        teacher_of: dict[str, str] = {}
        samples: list[Sample] = []
        for group, lesson in zip(groups, lessons, strict=True):
            for trajectory in group.trajectories:
                for sample in _samples(trajectory, lesson.config_version, min_version):
                    teacher_of[sample.id] = lesson.teacher
                    samples.append(sample)
        taught = self.trainer.teachers.teach(samples, lambda sample: teacher_of[sample.id])
        stored = self.trainer.ranks.sum(self.trainer.teachers.store.bytes)
        try:
            metrics = self.trainer.step(taught)
        finally:
            self.trainer.teachers.store.clear()
        stamps = [sample.config_version for sample in samples]
        return metrics | {
            "opd/config.min": float(min(stamps)),
            "opd/config.max": float(max(stamps)),
            "opd/hidden_bytes": float(stored),
            "opd/samples": float(len(samples)),
        }


def _samples(trajectory: Trajectory, config_version: int, min_version: int) -> list[Sample]:
    """The trajectory's samples, stamped; those without a fresh token are left out."""
    found = trajectory_samples(trajectory, 0.0, config_version=config_version)
    kept: list[Sample] = []
    for sample in found:
        mask = sample.loss_mask & (sample.policy_version >= min_version)
        if mask.any():
            kept.append(sample if mask.sum() == sample.trained_tokens else replace(sample, loss_mask=mask))
    return kept
