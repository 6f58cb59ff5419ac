"""What an evaluation is going to sample, and the hashes by which two results are known to be comparable."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import envs.registry
from envs.base import Environment
from envs.types import Task
from rl.evals.rows import Cell
from rl.evals.settings import EvalSettings

_ENGINE = ("engine", "fake_quant", "exact", "storage", "replay")


class PlanError(ValueError):
    """An environment without tasks to evaluate, or a folder that cannot be used: what to change."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a cell's result stands for; two of them are compared only when the last five fields are equal.

    `environment` hashes tasks, tools, options, reward and source; `sampling` everything that the draws
    depend on besides the weights.
    """

    model: str
    step: int
    digest: str
    effort: int
    scaffold: str
    n: int
    environment: str
    sampling: str

    def differences(self, other: Identity) -> list[str]:
        """What forbids a comparison, as `n: 200 and 100`."""
        names = ("effort", "scaffold", "n", "environment", "sampling")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name}: {a} and {b}" for name, a, b in pairs if a != b]


@dataclass(frozen=True, slots=True)
class Planned:
    """One cell: its environment, tasks and identity."""

    cell: Cell
    env: Environment
    tasks: Sequence[Task]
    identity: Identity


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """All cells of an evaluation, in the order in which they are sampled."""

    settings: EvalSettings
    cells: tuple[Planned, ...]

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return sum(len(planned.tasks) for planned in self.cells) * self.settings.k


def make_plan(settings: EvalSettings, name: str, step: int, digest: str) -> EvalPlan:
    """Loads environments and their tasks; the last three arguments say which policy is evaluated.

    Raises:
        PlanError: A split has fewer tasks than asked for.
        PluginError: An environment is unknown or broken.
    """
    sampling = _hash(_sampling(settings))
    cells: list[Planned] = []
    for env_name in settings.env:
        options = settings.options.get(env_name, {})
        env = envs.registry.load(env_name, **options)
        tasks = _tasks(env, settings)
        environment = environment_hash(env, options, settings.split, tasks)
        for scaffold in settings.scaffold:
            for effort in settings.effort:
                identity = Identity(name, step, digest, effort, scaffold, len(tasks), environment, sampling)
                cells.append(Planned(Cell(env_name, effort, scaffold), env, tasks, identity))
    return EvalPlan(settings, tuple(cells))


def environment_hash(env: Environment, options: Mapping[str, Any], split: str, tasks: Sequence[Task]) -> str:
    """First 16 hex digits of a hash of all that makes a task of this environment what it is."""
    tools = [[tool.name, tool.description, dict(tool.parameters)] for tool in env.tools]
    return _hash(
        [
            env.name,
            dict(options),
            split,
            [task.content_hash for task in tasks],
            tools,
            env.reward_name,
            _source(env),
        ]
    )


def _source(env: Environment) -> str:
    """The source of the environment's module: a changed verifier makes another environment."""
    function = getattr(getattr(env, "definition", None), "function", None)
    module = sys.modules.get(getattr(function, "__module__", type(env).__module__))
    try:
        return "" if module is None else inspect.getsource(module)
    except OSError:
        return ""


def _tasks(env: Environment, settings: EvalSettings) -> list[Task]:
    if settings.split not in env.splits:
        raise PlanError(
            f"environment {env.name!r} has no split {settings.split!r}; give split= one of "
            f"{', '.join(env.splits)}"
        )
    tasks = list(islice(env.tasks(settings.split, settings.seed), settings.n))
    if len(tasks) < settings.n:
        raise PlanError(
            f"environment {env.name!r} has {len(tasks)} tasks in split {settings.split!r}, n={settings.n} "
            f"were asked for; give n={len(tasks)} or less"
            if tasks
            else f"environment {env.name!r} has no task in split {settings.split!r}; give another split="
        )
    return tasks


def _sampling(settings: EvalSettings) -> dict[str, Any]:
    names = ("k", "seed", "temperature", "top_p", "top_k", "max_completion_tokens", "max_tokens", "max_turns")
    engine = (*_ENGINE, "vllm") if settings.engine == "vllm" else _ENGINE
    return settings.model_dump(mode="json", include={*names, *engine, "deadline_s"})


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]
