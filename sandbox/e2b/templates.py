"""Templates: what an E2B client names when it creates a sandbox, and what the operator means by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox.errors import PolicyError
from sandbox.session import spec_from
from sandbox.types import Limits, SandboxSpec

BASE = "base"
_OURS = frozenset({"labels", "ttl_s", "life_s", "journal"})


@dataclass(frozen=True, slots=True)
class Template:
    """A specification, on which backend, and what commands find: their folder and variables."""

    spec: SandboxSpec = field(default_factory=SandboxSpec)
    backend: str = "auto"
    cwd: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict[str, str])


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    spec: dict[str, Any] = Field(default_factory=dict[str, Any])
    backend: str = "auto"
    cwd: str = Field("/workspace", pattern="^/")
    env: dict[str, str] = Field(default_factory=dict[str, str])


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1]
    templates: dict[str, _Entry]


def read_templates(path: Path | None) -> dict[str, Template]:
    """Returns the templates of an operator's file by name; `base` is plain unless it says otherwise.

    Raises:
        PolicyError: It cannot be read, or says what is not understood.
    """
    if path is None:
        return {BASE: Template()}
    try:
        read = _File.model_validate(json.loads(path.read_text()))
        return {BASE: Template(), **{name: _template(entry) for name, entry in read.templates.items()}}
    except OSError as error:
        raise PolicyError(f"the templates {path} cannot be read: {error.strerror}") from error
    except (ValidationError, ValueError, TypeError) as error:
        raise PolicyError(f"{path} is not a file of templates: {error}") from error


def _template(entry: _Entry) -> Template:
    if taken := _OURS & entry.spec.keys():
        raise ValueError(f"{', '.join(sorted(taken))} of a template come from its clients")
    limits = {**asdict(Limits()), **entry.spec.get("limits", {})}
    spec = spec_from({**entry.spec, "limits": limits})
    return Template(spec, entry.backend, entry.cwd, entry.env)
