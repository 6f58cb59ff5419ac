"""Continuing a run: its own overrides are taken up again, and a change that would break it is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl.launch.config import RunConfig
from rl.launch.run import as_plain

_FIXED = (
    "env",
    "model",
    "scaffold",
    "algorithm.group_size",
    "effort.levels",
    "effort.distribution",
    "effort.in_prompt",
    "rollout.curriculum",
    "run.seed",
    "sft.steps",
    "sft.batch_size",
    "launcher.replicas",
)
_ONCE = ("resume", "clean", "run.resume", "run.clean")


class ResumeError(ValueError):
    """A change of configuration that the run's checkpoint cannot take: which keys, and what to do."""


def with_stored_overrides(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides with those of the run that is to be resumed before them; others unchanged."""
    values = {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in overrides)}
    resume = values.get("resume", values.get("run.resume", "false")).lower() == "true"
    name = values.get("name", values.get("run.name", ""))
    path = Path(values.get("run.root", "runs")).expanduser() / name / "overrides.yaml"
    if not (resume and name and path.is_file()):
        return list(overrides)
    stored: list[str] = yaml.safe_load(path.read_text())
    kept = [text for text in stored if text.lstrip("+").partition("=")[0] not in (*_ONCE, *values)]
    return [*kept, *overrides]


def check_changes(config: RunConfig) -> list[str]:
    """Returns one line for each setting in which a resumed run differs from its earlier attempt.

    Raises:
        ResumeError: A setting differs that the checkpoint depends on.
    """
    path = Path(config.run.root).expanduser() / config.run.name / "resolved.yaml"
    if not (config.run.resume and path.is_file()):
        return []
    before, now = flat(yaml.safe_load(path.read_text())), flat(as_plain(config))
    changed = {
        key: f"{key}: {before.get(key)} before, {now.get(key)} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key.removeprefix("run.") not in ("resume", "clean")
    }
    fixed = [
        text for key, text in changed.items() if any(key == f or key.startswith(f"{f}.") for f in _FIXED)
    ]
    if fixed:
        raise ResumeError(
            f"run {config.run.name!r} cannot continue with other settings ({'; '.join(fixed)}); "
            "take them back, or start a new run with another run.name"
        )
    return [f"changed since the last attempt: {text}" for text in changed.values()]


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns the leaves of a nested mapping by their full path."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{path}{key}.")
        else:
            leaves[f"{path}{key}"] = value
    return leaves
