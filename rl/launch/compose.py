"""From command-line overrides to a validated `RunConfig`, with every problem reported at once.

Hydra composes the groups; unknown keys are refused here, whether they were written with `+` or without, and the
nearest valid key is named. Nothing a user types is silently ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from rl.launch.config import RunConfig

_SHORT = {"resume": "run.resume", "clean": "run.clean", "name": "run.name", "seed": "run.seed"}


class ConfigError(ValueError):
    """A configuration that cannot run. The message lists every problem and what to change."""


def load_config(overrides: Sequence[str]) -> RunConfig:
    """Composes `conf/` with `overrides` (`experiment=calc trainer.steps=10`) and validates the result.

    Raises:
        ConfigError: A key is unknown, a value is wrong, or settings do not fit together.
    """
    tree = compose_tree(overrides)
    problems = [_unknown(path, names) for path, names in unknown_keys(tree, RunConfig)]
    if problems:
        raise ConfigError("\n".join(problems))
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> RunConfig:
    """Validates a composed tree.

    Raises:
        ConfigError: A value is wrong, or settings do not fit together.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_problem(details) for details in error.errors())) from error


def compose_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the composed and resolved tree, unvalidated.

    Raises:
        ConfigError: Hydra cannot read an override, or a group has no such option.
    """
    groups = config_groups()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("conf", version_base="1.3"):
            tree = compose("config", overrides=[_normalise(text, groups) for text in overrides])
            plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides, groups)) from error
    assert isinstance(plain, dict)
    return typing.cast("dict[str, Any]", plain)


def config_groups() -> dict[str, list[str]]:
    """Returns the groups of `conf/` with their options, sorted."""
    found: dict[str, list[str]] = {}
    for folder in resources.files("conf").iterdir():
        if folder.is_dir() and not folder.name.startswith("_"):
            options = sorted(
                f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
            )
            if options:
                found[folder.name] = options
    return found


def unknown_keys(tree: Mapping[str, Any], model: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yields each key of `tree` that `model` does not have: its full path, and all valid paths."""
    names = section_fields(model)
    for key, value in tree.items():
        here = f"{path}{key}"
        if key not in names:
            yield here, list(valid_keys(RunConfig))
        elif isinstance(value, Mapping) and (section := _section(names[key])) is not None:
            yield from unknown_keys(value, section, f"{here}.")


def valid_keys(model: Any, path: str = "") -> Iterator[str]:
    """Yields the full path of every key below `model`, sections included."""
    for name, kind in section_fields(model).items():
        yield f"{path}{name}"
        if (section := _section(kind)) is not None:
            yield from valid_keys(section, f"{path}{name}.")


def section_fields(model: Any) -> dict[str, Any]:
    """Returns the fields of a section (a pydantic model or a dataclass) with their types."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return {name: info.annotation for name, info in model.model_fields.items()}
    hints = typing.get_type_hints(model)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(model) if entry.init}


def _section(kind: Any) -> Any:
    """Returns the section that a type stands for (also `Section | None`), or None for a plain value."""
    for option in typing.get_args(kind) or (kind,):
        if isinstance(option, type) and (issubclass(option, BaseModel) or dataclasses.is_dataclass(option)):
            return option
    return None


def _normalise(text: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Turns an assignment into one that Hydra always takes, so that our own check sees unknown keys."""
    key, equals, value = text.partition("=")
    bare = key.lstrip("+")
    if not equals or bare in groups or "@" in bare or key.startswith("~"):
        return text
    return f"++{_SHORT.get(bare, bare)}={value}"


def _unknown(path: str, names: Sequence[str]) -> str:
    near = nearest(path, names)
    hint = f"; did you mean {near}?" if near else "; `temper train --help` says how to list the valid keys"
    return f"{path}: there is no such key{hint}"


def nearest(path: str, names: Sequence[str]) -> str:
    """Returns the name closest to `path`, or the empty string; a right last part counts as close."""
    leaf = path.rsplit(".", 1)[-1]
    same_leaf = [
        name for name in names if difflib.SequenceMatcher(None, name.rsplit(".", 1)[-1], leaf).ratio() > 0.8
    ]
    close = difflib.get_close_matches(path, same_leaf or names, n=1, cutoff=0.5)
    return close[0] if close else (same_leaf[0] if same_leaf else "")


def _problem(details: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in details["loc"])
    text = re.sub(r"^(Value error|Assertion failed), ", "", details["msg"])
    given = "" if details["type"] in ("value_error", "missing") else f" (given: {details['input']!r})"
    return f"{where}: {text}{given}" if where else text


def _explain(error: Exception, overrides: Sequence[str], groups: Mapping[str, Sequence[str]]) -> str:
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key in groups and value not in groups[key]:
            near = nearest(value, groups[key])
            hint = f"did you mean {key}={near}? " if near else ""
            return f"{key}={value}: there is no such option; {hint}The options are {', '.join(groups[key])}"
        if "=" not in text:
            return f"{text}: an override has the form key=value (or group=option)"
    return str(error).splitlines()[0]
