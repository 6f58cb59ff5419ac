"""The driver's side of a distillation: looks after the mix, and routes each group of a batch to its teacher.

The loop is the one of reinforcement (`rl.controller`); only the step is another.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from envs.types import Group
from model.chat import load_chat
from model.checkpoint import read_config
from model.hf.folder import is_hf_folder
from rl import build
from rl.distil.mix import FILE_NAME, Mix, MixError, read_mix, write_mix
from rl.distil.versions import MixVersions
from rl.environments import load_environments, shares
from rl.evals.target import find_target
from rl.launch.config import RunConfig
from rl.rollout.buffer import Batch
from rl.rollout.dispatch import Dispatcher
from rl.rollout.mixture import MixedStream, Source
from rl.trainers.distiller import Lesson
from rl.trainers.opd import TeacherConfig
from rl.watch.watch import Watch


class Student(Protocol):
    """The trainer's process as a distillation sees it."""

    async def distil(
        self,
        batch: Batch,
        lessons: Sequence[Lesson],
        folders: Mapping[str, str],
        weights: Mapping[str, float],
    ) -> dict[str, float]:
        """Takes one step on groups with their lessons; `folders` and `weights` are the active teachers'."""
        ...

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint."""
        ...


class DistilStream(MixedStream):
    """A mixture whose shares follow the versions of the mix; its state holds them."""

    def __init__(self, sources: Mapping[str, Source], versions: MixVersions) -> None:
        super().__init__(sources, versions)
        self.versions = versions

    def state_dict(self) -> dict[str, Any]:
        """What sources learned, and all versions of the mix."""
        return {"versions": self.versions.state_dict(), "sources": super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.versions.load_state_dict(state["versions"])
        super().load_state_dict(state["sources"])


@dataclass(slots=True)
class Distillation:
    """Stands between loop and trainer: `step` is the learner's, `look` is called in every round."""

    config: RunConfig
    folder: Path
    student: Student
    versions: MixVersions
    watch: Watch
    dispatcher: Dispatcher | None = None
    _seen: int = 0
    _written: Mix | None = None
    _refused: str = ""
    _keys: dict[tuple[int, str], str] = field(default_factory=dict)

    async def look(self) -> None:
        """Takes up a changed file; one that cannot be used changes nothing, and is said once.

        Raises:
            MixError: The run just begins, and its file cannot be used.
        """
        stamp = await asyncio.to_thread(_stamp, self.folder / FILE_NAME)
        if stamp == self._seen:
            return
        try:
            mix = await asyncio.to_thread(read_mix, self.folder / FILE_NAME)
            if mix != self._written:
                await self._take(mix)
        except MixError as error:
            if not self._seen:
                raise MixError(f"{self.folder / FILE_NAME}: {error}") from error
            self._note(f"{FILE_NAME} is not followed: {error}; what was in force stays")
        self._seen = stamp

    async def _take(self, mix: Mix) -> None:
        config = self.config
        mix.check(self.versions.names, config.algorithm.group_size)
        found = await asyncio.to_thread(resolved, mix, config)
        self._written = mix
        assert self.dispatcher is not None
        self.dispatcher.set_limits(mix.max_in_flight, mix.caps)
        if found != self.versions.current:
            version = self.versions.add(found, self.dispatcher.cursor)
            self._note(
                f"version {version} of {FILE_NAME} is in force from group {self.dispatcher.cursor} on: "
                f"teachers {', '.join(mix.teachers)}; shares {dict(mix.shares)}; "
                f"at most {mix.max_in_flight} in flight"
            )

    def _note(self, text: str) -> None:
        if text != self._refused:
            self.watch.note(text)
        self._refused = text

    async def step(self, batch: Batch) -> dict[str, float]:
        """Takes one step: each group is taught by whom the mix under which it began names."""
        lessons = [self._lesson(group) for group in batch.groups]
        assert self.dispatcher is not None
        alive = {self.versions.version_of(group) for group in self.dispatcher.open_groups()}
        alive |= {lesson.config_version for lesson in lessons} | {self.versions.version}
        folders: dict[str, str] = {}
        weights: dict[str, float] = {}
        for version in sorted(alive):
            for name, teacher in self.versions.mix_of(version).teachers.items():
                key = self._key(version, name)
                folders[key], weights[key] = teacher.path, teacher.weight
        metrics = await self.student.distil(batch, lessons, folders, weights)
        return metrics | {
            "opd/config.version": float(self.versions.version),
            "opd/teachers": float(len(folders)),
        }

    async def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint."""
        await self.student.save(step, state)

    def _lesson(self, group: Group) -> Lesson:
        version = self.versions.version_of(group.id)
        environment, _ = self.versions.at(group.id)
        name = self.versions.mix_of(version).teacher_of(environment, group.task.id)
        return Lesson(self._key(version, name), version)

    def _key(self, version: int, name: str) -> str:
        """The name of a teacher towards the trainer: another one after its folder has changed."""
        if (version, name) not in self._keys:
            paths = [self._path(number, name) for number in range(1, version + 1)]
            changed = max(
                (n for n in range(1, version) if paths[n] != paths[n - 1] and paths[n - 1]), default=0
            )
            self._keys[version, name] = f"{name}@{changed + 1}" if changed else name
        return self._keys[version, name]

    def _path(self, version: int, name: str) -> str:
        teacher = self.versions.mix_of(version).teachers.get(name)
        return "" if teacher is None else teacher.path


def first_mix(config: RunConfig) -> Mix:
    """The mix that a run's configuration gives."""
    environments = load_environments(config)
    return Mix(
        config.opd.teachers, shares(config, environments), config.rollout.max_in_flight, config.env.caps
    )


def check_teachers(config: RunConfig) -> None:
    """Looks for the teachers, which are needed after the warm start only, before anything is started.

    Raises:
        MixError: The mix cannot be used.
    """
    mix = first_mix(config)
    mix.check(sorted(mix.shares), config.algorithm.group_size)
    resolved(mix, config)


def open_distillation(config: RunConfig, folder: Path, student: Student, watch: Watch) -> Distillation:
    """Begins a distillation; makes the file of its mix in `folder`, unless it is there already.

    Raises:
        MixError: The mix cannot be used.
    """
    mix, path = first_mix(config), folder / FILE_NAME
    versions = MixVersions(sorted(mix.shares))
    mix.check(versions.names, config.algorithm.group_size)
    versions.add(resolved(mix, config), 0)
    if not path.exists():
        write_mix(path, mix)
    return Distillation(config, folder, student, versions, watch)


def resolved(mix: Mix, config: RunConfig) -> Mix:
    """The mix with the folders of its teachers' policies, which are looked at.

    Raises:
        MixError: A teacher is not there, or does not speak the student's tokens.
    """
    own = build.chat_format(config).tokenizer
    teachers: dict[str, TeacherConfig] = {}
    for name, teacher in mix.teachers.items():
        try:
            policy = find_target(teacher.path, Path(config.run.root)).policy
            if not is_hf_folder(policy):
                read_config(policy)
            theirs = load_chat(policy).tokenizer
        except (ValueError, RuntimeError, OSError) as error:
            raise MixError(f"teacher {name}: {error}") from error
        if theirs.digest() != own.digest():
            raise MixError(
                f"teacher {name} ({policy}) has another tokenizer than the student: its probabilities are "
                "of other tokens; take a teacher with the student's tokenizer"
            )
        teachers[name] = replace(teacher, path=str(policy))
    return replace(mix, teachers=teachers)


def _stamp(path: Path) -> int:
    """Changes whenever the file does; 1 when it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return 1
    return hash((found.st_mtime_ns, found.st_size, found.st_ino)) or 1
