"""What a warm pool is of: a specification, its backend and a number; and when two are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from sandbox.errors import PolicyError
from sandbox.session import spec_from
from sandbox.types import SandboxSpec

WARM = "TEMPER_SANDBOX_WARM"
"""The variable with what the local node keeps warm: `FILE=COUNT`, several parted by a colon."""

_FIELDS = ("spec", "backend", "count")


@dataclass(frozen=True, slots=True)
class Warm:
    """So many sandboxes of a specification are to be ready."""

    spec: SandboxSpec
    backend: str
    count: int


def pool_id(backend: str, spec: SandboxSpec) -> str:
    """Returns the name of the pool of a specification: the same for equal ones, and for no others."""
    return hashlib.sha256(json.dumps([backend, _plain(asdict(spec))]).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Returns a value in the one shape of all that equal it: numbers as fractions, names in their order."""
    if isinstance(value, Mapping):
        return sorted((str(name), _plain(one)) for name, one in cast("Mapping[Any, Any]", value).items())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("list[Any]", value)]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def read_warm(word: str) -> Warm:
    """Returns what `FILE` or `FILE=COUNT` stands for: a JSON object with `spec`, `backend` and `count`.

    Args:
        word: The file, and a number that goes before the one in it.

    Raises:
        PolicyError: The file cannot be read or says something else; the text says what.
    """
    name, sign, number = word.rpartition("=")
    path, count = (Path(name), number) if sign and number.isdecimal() else (Path(word), "")
    try:
        data: Any = json.loads(path.expanduser().read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"the warm pool {path} cannot be read: {error}") from error
    found = cast("dict[str, Any]", data) if isinstance(data, dict) else {"no object": data}
    if odd := {*found} - {*_FIELDS}:
        raise PolicyError(
            f"{path} has {', '.join(sorted(odd))}: a warm pool is a JSON object with {', '.join(_FIELDS)}"
        )
    return Warm(
        _spec(path, found.get("spec", {})),
        str(found.get("backend", "auto")),
        size(int(count) if count else found.get("count", 0), str(path)),
    )


def size(count: Any, where: str) -> int:
    """Returns a pool's size.

    Raises:
        PolicyError: It is none.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= 4096:
        raise PolicyError(
            f"{where}: a warm pool has a count from 1 to 4096, not {count!r} (or say FILE=COUNT)"
        )
    return count


def _spec(path: Path, given: Any) -> SandboxSpec:
    whole = asdict(SandboxSpec())
    try:
        for name in given:
            if name not in whole:
                raise PolicyError(f"{path}: a specification has no {name!r}, only {', '.join(whole)}")
        limits = {**whole["limits"], **given.get("limits", {})}
        return spec_from({**whole, **given, "limits": limits})
    except (TypeError, AttributeError) as error:
        raise PolicyError(f"{path}: this is no specification of a sandbox: {error}") from error
