"""What may change while a distillation is going: teachers, shares of the environments, and concurrency.

It is a file in the run's folder, written when the run begins and read again whenever it changes. Each
reading that differs is a new version; samples carry the version under which they began, and are taught as it
said.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl.launch.run import write_atomically
from rl.trainers.opd import TeacherConfig

FILE_NAME = "distillation.yaml"
_HEADER = """\
# Teachers, shares and concurrency of this distillation. Save a change, and groups that begin from then on
# follow it; samples that are under way stay with what was in force when they began.
"""


class MixError(ValueError):
    """A mix that cannot be used: what is wrong, and what to write."""


class _File(BaseModel):
    """The file as it is written."""

    model_config = ConfigDict(extra="forbid")

    teachers: dict[str, TeacherConfig] = Field(min_length=1)
    shares: dict[str, float]
    max_in_flight: int = Field(ge=1)
    caps: dict[str, int] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mix:
    """Teachers by name, each environment's share of the groups, and how many samples may be in flight.

    `max_in_flight` is for all together, `caps` for single environments.
    """

    teachers: Mapping[str, TeacherConfig]
    shares: Mapping[str, float]
    max_in_flight: int
    caps: Mapping[str, int] = field(default_factory=dict[str, int])

    def teacher_of(self, environment: str, task: str) -> str:
        """Returns the name of a task's teacher: by its id, else by environment, else the one for all.

        Raises:
            MixError: There is none.
        """
        for name, teacher in self.teachers.items():
            if any(fnmatch.fnmatchcase(task, pattern) for pattern in teacher.tasks):
                return name
        for name, teacher in self.teachers.items():
            if environment in teacher.envs:
                return name
        for name, teacher in self.teachers.items():
            if not teacher.envs and not teacher.tasks:
                return name
        raise MixError(
            f"no teacher for task {task} of environment {environment}: name the environment in a teacher's "
            "envs, or give one teacher neither envs nor tasks, so that it teaches the rest"
        )

    def check(self, environments: Iterable[str], group_size: int) -> None:
        """Refuses what cannot work in a run with these environments.

        Raises:
            MixError: Shares or caps name other environments, are out of range, or an environment has no
                teacher.
        """
        names = sorted(environments)
        if sorted(self.shares) != names:
            raise MixError(
                f"shares are of {', '.join(sorted(self.shares))}; give one to each of {', '.join(names)}"
            )
        if not all(math.isfinite(share) and share > 0 for share in self.shares.values()):
            raise MixError(f"shares are numbers above 0, not {dict(self.shares)}")
        if unknown := sorted(set(self.caps) - set(names)):
            raise MixError(f"caps name {', '.join(unknown)}; there are {', '.join(names)}")
        for name, cap in {"max_in_flight": self.max_in_flight, **self.caps}.items():
            if cap < group_size:
                raise MixError(f"{name}: {cap} has no room for a group of {group_size} samples")
        for teacher, config in self.teachers.items():
            if unknown := sorted(set(config.envs) - set(names)):
                raise MixError(
                    f"teacher {teacher} teaches {', '.join(unknown)}; there are {', '.join(names)}"
                )
        chosen_by_task = any(teacher.tasks for teacher in self.teachers.values())
        for name in names:
            if not chosen_by_task:
                self.teacher_of(name, "")

    def to_json(self) -> dict[str, Any]:
        """The mix as JSON values."""
        return {
            "teachers": {name: _plain(teacher) for name, teacher in self.teachers.items()},
            "shares": dict(self.shares),
            "max_in_flight": self.max_in_flight,
            "caps": dict(self.caps),
        }


def mix_from_json(data: Mapping[str, Any]) -> Mix:
    """Reads what `to_json` gave, or a file's content.

    Raises:
        MixError: A key is unknown or missing, or a value is of the wrong kind.
    """
    try:
        found = _File.model_validate(dict(data))
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise MixError("; ".join(lines)) from error
    return Mix(found.teachers, found.shares, found.max_in_flight, found.caps)


def read_mix(path: Path) -> Mix:
    """Reads the file.

    Raises:
        MixError: It cannot be read.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MixError(f"it cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise MixError("it holds no keys; it has teachers, shares, max_in_flight and caps")
    return mix_from_json(data)


def write_mix(path: Path, mix: Mix) -> None:
    """Writes the file."""
    write_atomically(path, _HEADER + yaml.safe_dump(mix.to_json(), sort_keys=False))


def _plain(teacher: TeacherConfig) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(teacher).items()}
