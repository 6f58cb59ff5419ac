"""From command-line overrides to a validated `RunConfig`, with every problem reported at once.

Hydra composes the groups; unknown keys are refused here, whether they were written with `+` or without, and
the nearest valid key is named. Nothing a user types is silently ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
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
from pydantic import BaseModel, TypeAdapter, ValidationError

from rl.launch.config import RunConfig

_SHORT = {"resume": "run.resume", "clean": "run.clean", "name": "run.name", "seed": "run.seed"}


class ConfigError(ValueError):
    """A configuration that cannot run. The message lists every problem and what to change."""


def load_config(overrides: Sequence[str]) -> RunConfig:
    """Composes `conf/` with `overrides` (`experiment=calc trainer.steps=10`) and validates the result.

    Raises:
        ConfigError: Something cannot be read, a key is unknown, a value is wrong, or settings do not fit
            together. The message has one line for each problem.
    """
    groups = config_groups()
    problems = [problem for text in overrides if (problem := _unreadable(text, groups))]
    readable = [text for text in overrides if not _unreadable(text, groups)]
    tree = _compose(readable, groups)
    problems += [_unknown(path, list(valid_keys(RunConfig))) for path in unknown_keys(tree, RunConfig)]
    config, wrong = _validated(_with_defaults(_known_part(tree, RunConfig)))
    wrong = wrong or [
        f"{path} is nan, which is no number; give one, or leave it out" for path in _without_number(tree)
    ]
    if problems or wrong or config is None:
        raise ConfigError("\n".join(problems + wrong))
    return config


def _compose(overrides: Sequence[str], groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns the composed and resolved tree, unvalidated."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("conf", version_base="1.3"):
            tree = compose("config", overrides=[_normalise(text, groups) for text in overrides])
            plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{str(error).splitlines()[0]} (given: {' '.join(overrides)})") from error
    assert isinstance(plain, dict)
    return typing.cast("dict[str, Any]", plain)


def _validated(tree: Mapping[str, Any]) -> tuple[RunConfig | None, list[str]]:
    try:
        return RunConfig.model_validate(tree), []
    except ValidationError as error:
        return None, [_problem(details) for details in error.errors()]


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


def unknown_keys(tree: Mapping[str, Any], model: Any, path: str = "") -> Iterator[str]:
    """Yields the full path of each key of `tree` that `model` does not have (leaves only)."""
    names = section_fields(model)
    for key, value in tree.items():
        here = f"{path}{key}"
        if key not in names:
            yield from _leaves(value, here)
        elif isinstance(value, Mapping) and (section := section_of(names[key])) is not None:
            yield from unknown_keys(value, section, f"{here}.")


def _leaves(value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value:
        yield path
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}")


def _without_number(tree: Any, path: str = "") -> Iterator[str]:
    """Yields the path of each value that is NaN, which no comparison of a check would catch."""
    if isinstance(tree, float) and math.isnan(tree):
        yield path
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _without_number(value, f"{path}.{key}" if path else str(key))


def _known_part(tree: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Returns `tree` without the keys that `model` does not have, so that the rest can be checked too."""
    names = section_fields(model)
    return {
        key: _known_part(value, section)
        if isinstance(value, Mapping) and (section := section_of(names[key])) is not None
        else value
        for key, value in tree.items()
        if key in names
    }


def _with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Fills each section with its own defaults, so that one given key leaves the others as they were."""
    filled = dict(tree)
    for name, info in RunConfig.model_fields.items():
        if info.default_factory is not None:
            default = info.get_default(call_default_factory=True, validated_data={})
            plain = TypeAdapter(type(default)).dump_python(default)
            filled[name] = _merged(plain, tree.get(name, {}))
    return filled


def _merged(base: Mapping[str, Any], over: Any) -> Any:
    if not isinstance(over, Mapping):
        return over
    both = {k: _merged(base[k], v) if isinstance(base.get(k), Mapping) else v for k, v in over.items()}
    return {**base, **both}


def valid_keys(model: Any, path: str = "") -> Iterator[str]:
    """Yields the full path of every key below `model`, sections included."""
    for name, kind in section_fields(model).items():
        yield f"{path}{name}"
        if (section := section_of(kind)) is not None:
            yield from valid_keys(section, f"{path}{name}.")


def section_fields(model: Any) -> dict[str, Any]:
    """Returns the fields of a section (a pydantic model or a dataclass) with their types."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return {name: info.annotation for name, info in model.model_fields.items()}
    hints = typing.get_type_hints(model)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(model) if entry.init}


def section_of(kind: Any) -> Any:
    """Returns the section that a type stands for (also `Section | None`), or None for a plain value.

    A mapping of sections by free names is a plain value: its keys are not known beforehand.
    """
    if typing.get_origin(kind) is dict:
        return None
    for option in typing.get_args(kind) or (kind,):
        if isinstance(option, type) and (issubclass(option, BaseModel) or dataclasses.is_dataclass(option)):
            return option
    return None


def _normalise(text: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Turns an assignment into one that Hydra always takes, so that our own check sees unknown keys."""
    key, equals, value = text.partition("=")
    bare = key.lstrip("+")
    if not equals or bare in groups or "@" in bare:
        return text
    return f"++{_SHORT.get(bare, bare)}={value}"


def _unknown(path: str, names: Sequence[str]) -> str:
    near = nearest(path, names)
    hint = f"; did you mean {near}?" if near else "; `temper train --help` says how to list the valid keys"
    return f"{path}: there is no such key{hint}"


def nearest(path: str, names: Sequence[str]) -> str:
    """Returns the name closest to `path`, or the empty string; the last part of a path counts most."""
    leaf = path.rsplit(".", 1)[-1]

    def score(name: str) -> float:
        whole = difflib.SequenceMatcher(None, name, path).ratio()
        return whole + difflib.SequenceMatcher(None, name.rsplit(".", 1)[-1], leaf).ratio()

    best = max(names, key=score, default="")
    return best if best and score(best) > 1.0 else ""


def _problem(details: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in details["loc"])
    text = re.sub(r"^(Value error|Assertion failed), ", "", details["msg"])
    if details["type"] == "tuple_type":
        text = f"a list is written [{details['input']}]"
    given = "" if details["type"] in ("value_error", "missing") else f" (given: {details['input']!r})"
    return f"{where}: {text}{given}" if where and not text.startswith(where) else f"{text}{given}"


def _unreadable(text: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Returns what is wrong with the form of one override, or the empty string."""
    key, equals, value = text.lstrip("+~").partition("=")
    if text.startswith("~"):
        return f"{text}: keys cannot be removed; give key=value instead"
    if not equals or not key:
        return f"{text}: an override has the form key=value (or group=option)"
    if key in groups and value not in (*groups[key], "null"):
        near = nearest(value, groups[key])
        hint = f"did you mean {key}={near}? " if near else ""
        return f"{key}={value}: there is no such option; {hint}the options are {', '.join(groups[key])}"
    return ""
