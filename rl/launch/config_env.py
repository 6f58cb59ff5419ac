"""The section of a run's configuration that names its environment, or a mixture of several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from rl.launch.section import Section
from rl.rollout.latency import Latency


class Member(Section):
    """One environment of a mixture.

    Attributes:
        share: of the groups, in proportion to the other members' shares.
        name: registered name or file path; empty: the name it has in the mixture.
        max_in_flight: bounds its samples in flight, below rollout.max_in_flight; null: no bound of its own.
    """

    share: float = Field(gt=0, allow_inf_nan=False)
    name: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    max_in_flight: int | None = Field(default=None, ge=1)


class Env(Section):
    """The environment by registered name or file path, its options, and its splits; or a mixture of several.

    Attributes:
        mixture: environments by a name of your choice, each with its share of the groups
            (`env=mixture env.mixture.calc=0.7 env.mixture.sort=0.3`), or with `share`, `name`, `options` and
            `max_in_flight`.
        latency: seconds added to every tool call, to see what slow tools cost; null: none.
    """

    name: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    mixture: dict[str, Member] = Field(default_factory=dict)
    latency: Latency | None = None
    train_split: str = "train"
    eval_split: str = "eval"

    @field_validator("mixture", mode="before")
    @classmethod
    def _bare_shares(cls, mixture: Any) -> Any:
        if not isinstance(mixture, dict):
            return mixture
        return {
            str(label): {"share": given}
            if isinstance(given, (int, float, str)) and not isinstance(given, bool)
            else given
            for label, given in mixture.items()
        }

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if self.name and self.mixture:
            raise ValueError(
                f"env.name={self.name} and env.mixture exclude each other: choose env=mixture, and give this "
                f"environment a share, such as env.mixture.{_stem(self.name)}=0.5"
            )
        if not self.name and not self.mixture:
            raise ValueError(
                "no environment: choose one (env=calc, env.name=path/to/file.py), or give several their "
                "shares (env=mixture env.mixture.calc=0.5 env.mixture.sort=0.5)"
            )
        if self.mixture and self.options:
            raise ValueError(
                f"env.options={self.options} has no effect on a mixture: options belong to its members "
                "(env.mixture.NAME.options)"
            )
        for label in self.mixture:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", label):
                raise ValueError(
                    f"env.mixture.{label}: name members with letters, digits, dashes and underscores; the "
                    "path of a file goes into env.mixture.NAME.name"
                )
        return self

    @property
    def title(self) -> str:
        """The environment's name in names of runs and metrics; a mixture's members with a plus."""
        return "+".join(sorted(self.mixture)) if self.mixture else _stem(self.name)

    @property
    def named(self) -> dict[str, dict[str, Any]]:
        """The options of every environment by its registered name or file path."""
        members = {member.name or label: member.options for label, member in self.mixture.items()}
        return members or {self.name: self.options}

    @property
    def caps(self) -> dict[str, int]:
        """Bounds on samples in flight, by member."""
        return {k: m.max_in_flight for k, m in self.mixture.items() if m.max_in_flight is not None}


def _stem(name: str) -> str:
    """The last part of an environment's name: `sums` of `path/to/file.py:sums`, else `file`."""
    return Path(name.split(".py:")[-1]).stem
