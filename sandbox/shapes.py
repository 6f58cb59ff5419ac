"""What a caller sends, checked before anything is done with it: types, signs and sizes.

A limit below nothing would give a project room that it does not have, a time that is no number would stop a
node's clock, and a command of a wrong shape would end the agent of its sandbox.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from sandbox.errors import PolicyError

if TYPE_CHECKING:
    from sandbox.channel import Header
    from sandbox.types import SandboxSpec

MAX_LIFE_S = 30 * 86400.0
MAX_FORKS = 256
MAX_LEASE_S = 7 * 86400.0
_MAX_COMMAND_S = 7 * 86400.0
_MAX_OUTPUT = 1 << 32
_MAX_AMOUNT = 1 << 62
_MAX_LABELS, _MAX_LABEL, _MAX_OWNER = 128, 1 << 16, 1000
_TEXTS = ("cwd", "path", "to", "base")
_COUNTS = (
    "limit", "process", "offset", "number", "rows", "columns", "mode", "max_bytes", "max_entries", "at",
    "source_bytes", "state", "user",
)  # fmt: skip
_TIMES = ("timeout_s", "wait_s", "life_s")


def check_spec(spec: SandboxSpec) -> SandboxSpec:
    """Returns a specification whose amounts are amounts.

    Raises:
        PolicyError: They are not.
    """
    for name, value in asdict(spec.limits).items():
        least = 0 if name in ("tmpfs_bytes", "tmpfs_inodes", "disk_bytes") else 1e-3
        if not is_number(value) or not least <= value <= _MAX_AMOUNT:
            raise PolicyError(f"a limit is a number above 0: {name} is {value!r}"[:200])
        if name != "cpus" and not isinstance(value, int):
            raise PolicyError(f"a limit is a whole number: {name} is {value!r}")
    for name, least in (("ttl_s", 1e-9), ("life_s", 0.0)):
        check_time(getattr(spec, name), name, least, MAX_LIFE_S)
    given = cast("object", spec.labels)
    labels = cast("Mapping[Any, Any]", given) if isinstance(given, Mapping) else {"": None}
    if len(labels) > _MAX_LABELS or not all(map(_is_label, (*labels, *labels.values()))):
        raise PolicyError(
            f"labels are at most {_MAX_LABELS} pairs of texts, each of {_MAX_LABEL} bytes at most"
        )
    if not isinstance(cast("object", spec.image), str) or not isinstance(cast("object", spec.journal), bool):
        raise PolicyError("an image has a name, which is a text, and a sandbox has a journal or has none")
    return spec


def check_owner(name: str) -> str:
    """Returns the name of an owner, which operators read in lists and logs.

    Raises:
        PolicyError: It has what a terminal or a log would obey, or is too long.
    """
    if not name.isprintable() or len(name) > _MAX_OWNER:
        raise PolicyError(
            f"an owner's name is printable text of at most {_MAX_OWNER} characters: {name[:60]!r}"
        )
    return name


def check_forks(count: object) -> int:
    """Returns how many sandboxes a fork makes.

    Raises:
        PolicyError: It is no number of them, or more than a node makes at once.
    """
    if not is_count(count) or not 0 < count <= MAX_FORKS:
        raise PolicyError(f"a fork makes 1 to {MAX_FORKS} sandboxes, not {str(count)[:40]}")
    return count


def check_time(value: object, name: str, least: float, most: float) -> float:
    """Returns a number of seconds.

    Raises:
        PolicyError: It is none, or beyond its bounds.
    """
    if not is_number(value) or not least <= value <= most:
        raise PolicyError(f"{name} is a number of seconds up to {most:g}, not {str(value)[:40]}")
    return value


def check_command(command: Header) -> None:
    """Returns when a command has the shape that the agent of a sandbox relies on.

    Raises:
        PolicyError: It has not.
    """
    for name, value in command.items():
        if name in _TEXTS and not _is_text(value):
            raise PolicyError(f"the {name} of a command is a text without NUL")
        if name in _COUNTS and value is not None and not (is_count(value) and value <= _MAX_AMOUNT):
            raise PolicyError(f"the {name} of a command is a whole number and not negative")
        if name in _TIMES and value is not None:
            check_time(value, name, 0.0, _MAX_COMMAND_S)
    if not is_count(command.get("limit", 0)) or command.get("limit", 0) > _MAX_OUTPUT:
        raise PolicyError(f"the limit of a command's output is at most {_MAX_OUTPUT} bytes")
    if command["op"] in ("exec", "start"):
        _check_words(command)


def _check_words(command: Header) -> None:
    words, env, size = command.get("argv"), command.get("env"), command.get("pty")
    if not isinstance(words, list) or not words or not all(map(_is_text, cast("list[Any]", words))):
        raise PolicyError("a command has an argv: texts without NUL, and at least one")
    pairs = cast("Mapping[Any, Any]", env) if isinstance(env, dict) else None
    if pairs is None or not all(map(_is_text, (*pairs, *pairs.values()))):
        raise PolicyError("the env of a command maps texts without NUL to such texts")
    if any(not name or "=" in name for name in pairs):
        raise PolicyError("a variable's name is not empty and has no =")
    sides = cast("list[Any]", size) if isinstance(size, list | tuple) else []
    if size is not None and not (
        len(sides) == 2 and all(is_count(side) and side < 1 << 16 for side in sides)
    ):
        raise PolicyError("a terminal has a number of rows and one of columns")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number and not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_label(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_LABEL
