"""What a reward of the library is, how to get one by name, and how several make one.

A reward is a function of (task, trajectory) that returns a number or a `Score`; it runs under the rules of
`envs.scoring`: time-limited, retried, and `Missing` rather than 0 when it fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from envs.killable import TIMEOUT_S, VerifierError
from envs.plugins import BrokenPluginError, Catalogue, check_options
from envs.scoring import Part, RewardFunction, judge
from envs.types import Missing, Score, Task, Trajectory

REWARDS = Catalogue(
    kind="reward",
    group="tempering.rewards",
    builtins={
        "exact": "rewards.answers:exact",
        "math": "rewards.math:equivalent",
        "normalized": "rewards.answers:normalized",
        "numeric": "rewards.answers:Numeric",
        "unit_tests": "rewards.unit_tests:UnitTests",
    },
)


@dataclass(frozen=True, slots=True)
class Reward:
    """Weighted, named parts as one reward. Judging never raises on account of a part."""

    name: str
    parts: tuple[Part, ...]

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score | Missing:
        """Judges a finished trajectory."""
        return await judge(self.parts, task, trajectory)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartConfig:
    """One part of a composed reward: a reward's name, its weight and limits, and its own options.

    Without a `timeout_s` the reward's own counts, where it has one.
    """

    reward: str
    weight: float = 1.0
    timeout_s: float | None = None
    retries: int = 1
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load(name: str, **options: Any) -> Reward:
    """Returns the reward of this name: built-in, entry point of group `tempering.rewards`, or import path.

    A class is built with the options; a function takes none.

    Raises:
        PluginError: Unknown, double or broken name, or unknown option; see `envs.plugins`.
    """
    return Reward(name, (_part(name, PartConfig(reward=name, options=options)),))


def compose(name: str, parts: Mapping[str, PartConfig]) -> Reward:
    """Returns the weighted sum of named parts.

    Raises:
        ValueError: There is no part, or none has weight.
        PluginError: A part's reward cannot be had.
    """
    if not any(part.weight for part in parts.values()):
        raise ValueError(f"reward {name!r} needs at least one part with a weight other than 0")
    return Reward(name, tuple(_part(key, part) for key, part in parts.items()))


def list_rewards() -> dict[str, str]:
    """Returns the known names with the import paths they come from."""
    return REWARDS.names()


def reference(task: Task) -> str:
    """Returns the answer a task is judged against: `private["answer"]`, else `gold`.

    Raises:
        VerifierError: There is none, or it is blank: nothing can be judged against it.
    """
    answer = task.private.get("answer", task.gold)
    if answer is None or not str(answer).strip():
        raise VerifierError(f"task {task.id!r} has no reference answer; set `gold` or `private['answer']`")
    return str(answer)


def _part(name: str, config: PartConfig) -> Part:
    function = REWARDS.resolve(config.reward)
    what = f"reward {config.reward!r}"
    if isinstance(function, type):
        check_options(what, function, config.options)
        function = function(**config.options)
    else:
        check_options(what, lambda: None, config.options)
    if not callable(function):
        raise BrokenPluginError(f"{what} is {function!r}; it must be a function of (task, trajectory)")
    timeout_s = config.timeout_s or getattr(function, "timeout_s", TIMEOUT_S)
    return Part(name, cast(RewardFunction, function), config.weight, timeout_s, config.retries)
