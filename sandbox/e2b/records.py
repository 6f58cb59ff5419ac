"""Sandboxes as E2B shows them. All that is known of one lies in its labels on its node."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from sandbox.e2b.connect import part
from sandbox.e2b.status import BAD, E2BError
from sandbox.e2b.templates import Template
from sandbox.types import SandboxSpec

VERSION = "0.6.1"
"""Of the agent that clients are told of; it decides what they ask for: before 0.6.2 no metadata of files."""

DOMAIN = "no-ports.invalid"
"""Where a sandbox's ports are said to be: a name that nobody can own, so that no request goes astray."""

IDLE_S = 30 * 86400.0
MAX_LIFE_S = 7 * 86400
_OURS = "e2b."
_TEMPLATE, _ENV, _CWD, _DIGEST = "e2b.template", "e2b.env", "e2b.cwd", "e2b.request"
_Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Home:
    """What commands of a sandbox find."""

    cwd: str
    env: Mapping[str, str]

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Home:
        """Reads it from the labels of a sandbox; one that another SDK made has plain ones."""
        return cls(labels.get(_CWD, "/workspace"), json.loads(labels.get(_ENV, "{}")))


def spec_of(template: Template, name: str, asked: _Json, life_s: float) -> SandboxSpec:
    """Returns the specification of a new sandbox: its template, with the client's metadata as labels.

    Raises:
        E2BError: Metadata or variables are not texts, or take names of ours.
    """
    metadata, env = texts(asked, "metadata"), texts(asked, "envVars")
    if taken := sorted(name for name in metadata if name.startswith(_OURS)):
        raise E2BError(BAD, f"metadata named {_OURS}... is this front's own: rename {', '.join(taken)}")
    labels = {
        **metadata, _TEMPLATE: name, _CWD: template.cwd, _ENV: json.dumps({**template.env, **env}),
        _DIGEST: digest(asked),
    }  # fmt: skip
    return replace(template.spec, labels=labels, ttl_s=IDLE_S, life_s=life_s, journal=False)


def digest(asked: Mapping[str, Any]) -> str:
    """Returns by what a repeated request is known to be the same."""
    text = json.dumps({name: asked[name] for name in sorted(asked)}, sort_keys=True)
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def same_request(about: _Json, asked: Mapping[str, Any]) -> bool:
    """Whether a sandbox was made by such a request."""
    return about["labels"].get(_DIGEST) == digest(asked)


def texts(asked: _Json, field: str) -> dict[str, str]:
    """Returns a field that maps texts to texts.

    Raises:
        E2BError: It does not.
    """
    value = part({field: asked.get(field) or {}}, field)
    if not isinstance(asked.get(field) or {}, dict) or not all(
        isinstance(text, str) for text in value.values()
    ):
        raise E2BError(BAD, f"{field} maps texts to texts")
    return value


def life_of(asked: Mapping[str, Any], field: str = "timeout", default: int = 300) -> float:
    """Returns for how long a client wants a sandbox, in seconds; one for 0 seconds ends at once.

    Raises:
        E2BError: That is no number of seconds, or too many.
    """
    value: Any = asked.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_LIFE_S:
        raise E2BError(BAD, f"{field} is a whole number of seconds, at most {MAX_LIFE_S}, not {value!r}")
    return value or 1e-6


def created(about: _Json, token: str) -> _Json:
    """Returns what the answer to a create or a connect says."""
    return {
        "templateID": template_of(about), "alias": template_of(about), "sandboxID": about["box"],
        "clientID": about["box"].partition(".")[0], "envdVersion": VERSION, "envdAccessToken": token,
        "domain": DOMAIN,
    }  # fmt: skip


def listed(about: _Json) -> _Json:
    """Returns a sandbox as lists have it."""
    left = IDLE_S if about["left_s"] is None else about["left_s"]
    limits = about["limits"]
    return {
        "templateID": template_of(about), "alias": template_of(about), "sandboxID": about["box"],
        "clientID": about["box"].partition(".")[0], "envdVersion": VERSION,
        "startedAt": moment(about["born_s"]), "endAt": moment(time.time() + left),
        "cpuCount": max(round(limits["cpus"]), 1), "memoryMB": limits["memory_bytes"] >> 20,
        "diskSizeMB": limits["tmpfs_bytes"] >> 20, "state": state_of(about), "metadata": metadata_of(about),
    }  # fmt: skip


def detailed(about: _Json, token: str) -> _Json:
    """Returns all that is told of one sandbox."""
    lifecycle = {"autoResume": False, "onTimeout": "kill"}
    return {**listed(about), "envdAccessToken": token, "domain": DOMAIN, "lifecycle": lifecycle}


def template_of(about: _Json) -> str:
    """Returns the name of the template of a sandbox."""
    return about["snapshot"] or about["labels"].get(_TEMPLATE, "")


def state_of(about: _Json) -> str:
    """Returns whether a sandbox is running or paused."""
    return "paused" if about["paused"] else "running"


def metadata_of(about: _Json) -> dict[str, str]:
    """Returns what the client said of a sandbox."""
    return {name: value for name, value in about["labels"].items() if not name.startswith(_OURS)}


def moment(seconds: float) -> str:
    """Returns a time since the epoch as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
