"""Settings as key=value words over a flat model: every key and value is checked, and all at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rl.engines.vllm_settings import VllmSettings

_VLLM: Final = "engine.vllm."
"""Begins the words of the field `vllm`, as in a run's configuration."""


M = TypeVar("M", bound=BaseModel)


class SettingsError(ValueError):
    """Settings that make no sense: one line for each."""


def read_words(
    kind: type[M], words: Sequence[str], base: Mapping[str, Any], fixed: Mapping[str, str] | None = None
) -> M:
    """Reads words over the values in `base`.

    Args:
        kind: what is read; it has fields `engine` and `vllm`.
        words: as the user gave them.
        base: the values of what is not given.
        fixed: fields that may not be given any more, and why.

    Raises:
        SettingsError: A word has another form, a key is unknown or fixed, or a value is wrong.
    """
    given: dict[str, Any] = {}
    names = [name for name in kind.model_fields if name != "vllm"]
    names += [_VLLM + field.name for field in fields(VllmSettings)]
    problems = [problem for word in words if (problem := _read_word(word, names, given))]
    problems += [f"{name}: {(fixed or {})[name]}" for name in sorted(given.keys() & (fixed or {}).keys())]
    vllm = {key.removeprefix(_VLLM): given.pop(key) for key in list(given) if key.startswith(_VLLM)}
    if vllm and fixed and "vllm" in fixed:
        problems.append(f"{_VLLM}*: {fixed['vllm']}")
    if vllm and given.get("engine", base["engine"]) != "vllm":
        problems.append(f"{_VLLM}{min(vllm)} has no effect with engine=native: give engine=vllm too")
    try:
        settings = kind.model_validate({**base, **given, "vllm": {**_plain(base.get("vllm", {})), **vllm}})
    except ValidationError as error:
        problems += [_problem(details, given) for details in error.errors()]
        raise SettingsError("\n".join(problems)) from None
    if problems:
        raise SettingsError("\n".join(problems))
    return settings


def _plain(settings: VllmSettings | Mapping[str, Any]) -> dict[str, Any]:
    return asdict(settings) if isinstance(settings, VllmSettings) else dict(settings)


def _read_word(word: str, names: Sequence[str], given: dict[str, Any]) -> str:
    """Puts a word into `given`; returns what is wrong with it."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        return f"{word}: a setting has the form key=value, as in {names[0]}=..."
    if key not in names:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"{key}: there is no such setting; {hint}There are {', '.join(names)}"
    if key in given:
        return f"{key} is given twice"
    try:
        given[key] = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return f"{word}: the value cannot be read; a list is written [1,50,100]"
    return ""


def _problem(details: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    own = details["type"] == "value_error"
    text = str(details["msg"]).removeprefix("Value error, ")
    key, *inner = map(str, details["loc"] or ("",))
    if key == "vllm":
        return text if own else f"{_VLLM}{'.'.join(inner)}: {text}"
    where = ".".join([key, *inner])
    value = f" (given: {given[key]!r})" if key in given and not own else ""
    return f"{where}: {text}{value}" if where else text
