"""What must not be in a layer: the strings, names and versions that give a task's answer away."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sandbox.errors import LayerError

_LEAST = 8
"""A line of a patch that is shorter says nothing."""

_FIELDS = {"strings", "regexes", "names", "patches", "package", "version", "waive"}
_LITERAL = re.compile(r"'([^'\\\n]{6,})'|\"([^\"\\\n]{6,})\"")
_NAME = re.compile(r"\b(?:def|class)\s+(\w{6,})")


class FindingKind(StrEnum):
    """Where an answer was found, or what could hold one."""

    TEXT = "text"
    NAME = "name"
    BYTECODE = "bytecode"
    STALE_BYTECODE = "stale_bytecode"
    ARCHIVE = "archive"
    GIT_OBJECT = "git_object"
    GIT_UNREACHABLE = "git_unreachable"
    GIT_REFLOG = "git_reflog"
    GIT_STASH = "git_stash"
    GIT_TAG = "git_tag"
    GIT_REMOTE = "git_remote"
    GIT_HISTORY = "git_history"
    SHELL_HISTORY = "shell_history"
    PACKAGE_CACHE = "package_cache"
    NEWER_PACKAGE = "newer_package"
    EDITOR_LEFTOVER = "editor_leftover"
    WHITEOUT = "whiteout"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: its kind, the path in the layer (`archive!member` inside an archive), and what it is."""

    kind: FindingKind
    path: str
    detail: str

    @property
    def name(self) -> str:
        """By which it can be waived."""
        return f"{self.kind}:{self.path}"

    def __str__(self) -> str:
        text = f"{self.name}  {self.detail}"  # names in files need not be text
        return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class Answers:
    """What to look for.

    Attributes:
        strings: That are in no file, in whatever form it lies there.
        regexes: The same, as regular expressions over bytes.
        names: Of files that are not there, such as hidden tests; shell patterns over names or whole paths.
        package: The target of the task as a package, of which `version` is the newest that may be there.
        version: Of the package.
        waive: Findings that are known and accepted, as shell patterns over `kind:path`.
    """

    strings: Sequence[str] = ()
    regexes: Sequence[str] = ()
    names: Sequence[str] = ()
    package: str = ""
    version: str = ""
    waive: Sequence[str] = ()
    _tokens: Sequence[str] = field(default=(), repr=False)

    @classmethod
    def read(cls, path: Path) -> Answers:
        """Reads a JSON file of the fields above, and `patches`: gold patches, of which added lines count.

        Raises:
            LayerError: It cannot be read, or is not that.
        """
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            if not isinstance(data, dict) or not set(data) <= _FIELDS:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"it has the fields {', '.join(sorted(_FIELDS))} and no others")
            patches = [(path.parent / name).read_text(errors="replace") for name in data.pop("patches", ())]
            added = [line for patch in patches for line in added_lines(patch)]
            fields: dict[str, Any] = {**data, "strings": [*data.get("strings", ()), *added]}
            answers = cls(**fields, _tokens=tokens(added))
            answers.pattern()
        except (OSError, ValueError, TypeError, AttributeError, re.error) as error:
            raise LayerError(f"{path} does not say what answers are: {error}") from error
        if not (answers.strings or answers.regexes or answers.names or answers.package):
            raise LayerError(f"{path} names nothing to look for")
        return answers

    def pattern(self) -> re.Pattern[bytes] | None:
        """Returns what finds a string or expression in bytes; None if there is none."""
        return _pattern([*map(re.escape, self.strings), *self.regexes])

    def bytecode(self) -> re.Pattern[bytes] | None:
        """Returns what finds them in compiled Python, where of a line only its names and texts are left."""
        parts = {*map(re.escape, self.strings), *self.regexes, *map(re.escape, self._tokens)}
        return _pattern(sorted(parts))

    def waived(self, finding: Finding) -> bool:
        """Whether a finding is accepted by name."""
        return any(fnmatchcase(finding.name, pattern) for pattern in self.waive)


def _pattern(parts: Sequence[str]) -> re.Pattern[bytes] | None:
    return re.compile("|".join(f"(?:{part})" for part in parts).encode(), re.MULTILINE) if parts else None


def added_lines(patch: str) -> Iterator[str]:
    """Yields the lines that a patch adds, without their indentation, unless they say too little."""
    for line in patch.splitlines():
        text = line[1:].strip()
        if (
            line.startswith("+")
            and not line.startswith("+++")
            and len(text) >= _LEAST
            and re.search(r"\w", text)
        ):
            yield text


def tokens(lines: Sequence[str]) -> list[str]:
    """Returns what compiled Python keeps of lines: texts, and names of functions and classes."""
    found = {a or b for line in lines for a, b in _LITERAL.findall(line)}
    return sorted(found | {name for line in lines for name in _NAME.findall(line)})
