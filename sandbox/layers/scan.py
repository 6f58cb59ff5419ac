"""The scan of a layer's tree for planted answers: in files, bytecode, archives, histories, caches, git."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from sandbox.errors import PlantedAnswerError
from sandbox.layers.answers import Answers, Finding, FindingKind
from sandbox.layers.scan_archives import Archives
from sandbox.layers.scan_git import repositories, scan_git
from sandbox.layers.scan_packages import CACHES, newer_in_path
from sandbox.layers.tree import Found, walk

_CHUNK, _OVERLAP = 4 << 20, 4096
_HISTORIES = re.compile(
    r"(\.(ba|z|a|k)?sh_history|\.history|\.(python|psql|mysql|sqlite|node_repl|irb|rediscli)_history"
    r"|fish_history|\.lesshst|\.viminfo|\.wget-hsts)$"
)
_LEFTOVERS = re.compile(r"(\.sw[a-p]|~|\.orig|\.rej|\.bak|\.un~)$|^#.*#$|^\.#")
_PYC_HEAD = 16


def scan(root: Path, answers: Answers) -> list[Finding]:
    """Returns what a tree has that answers say must not be there, waived findings left out."""
    found = [finding for finding in _scan(root, answers) if not answers.waived(finding)]
    return sorted(set(found), key=lambda finding: (finding.path, finding.kind))


def refuse(findings: list[Finding]) -> None:
    """Returns when there are no findings.

    Raises:
        PlantedAnswerError: There are; names them.
    """
    if findings:
        lines = "\n".join(f"  {finding}" for finding in findings[:20])
        more = f"\n  and {len(findings) - 20} more" if len(findings) > 20 else ""
        raise PlantedAnswerError(
            f"{len(findings)} findings; remove them, or waive them by name (`--waive`):\n{lines}{more}"
        )


def _scan(root: Path, answers: Answers) -> Iterator[Finding]:
    git = repositories(root)
    for repository in git:
        yield from scan_git(root, repository, answers)
    inside_git = tuple(f"{path.relative_to(root).as_posix()}/objects/" for path in git)
    for found in walk(root):
        yield from _by_name(found, answers)
        if found.kind == "file" and not found.path.startswith(inside_git):
            try:
                yield from _by_content(root, found, answers)
            except OSError as error:
                yield Finding(FindingKind.UNREADABLE, found.path, str(error))


def _by_name(found: Found, answers: Answers) -> Iterator[Finding]:
    name = found.path.rpartition("/")[2]
    text = f"{found.path}\n{_target(found)}".encode(errors="surrogateescape")
    matches = any(fnmatchcase(name, one) or fnmatchcase(found.path, one) for one in answers.names)
    if matches or ((pattern := answers.pattern()) and pattern.search(text)):
        kind = (
            FindingKind.WHITEOUT if found.kind == "whiteout" or name.startswith(".wh.") else FindingKind.NAME
        )
        yield Finding(kind, found.path, "the name is an answer's")
    elif name.startswith(".wh."):
        yield Finding(FindingKind.WHITEOUT, found.path, "a whiteout of an image, as a plain file")
    if found.kind == "file" and found.info.st_size and _HISTORIES.search(name):
        yield Finding(FindingKind.SHELL_HISTORY, found.path, f"{found.info.st_size} bytes of what was typed")
    if found.kind == "file" and _LEFTOVERS.search(name):
        yield Finding(FindingKind.EDITOR_LEFTOVER, found.path, "an editor or a patch left it")
    if found.kind == "dir" and any(found.path.endswith(cache) for cache in CACHES):
        yield Finding(FindingKind.PACKAGE_CACHE, found.path, "the cache of a package manager")
    if newer := newer_in_path(found, answers):
        yield Finding(FindingKind.NEWER_PACKAGE, found.path, newer)


def _target(found: Found) -> str:
    return str(Path(found.full).readlink()) if found.kind == "link" else ""


def _by_content(root: Path, found: Found, answers: Answers) -> Iterator[Finding]:
    path = Path(found.full)
    compiled = path.suffix in (".pyc", ".pyo")
    pattern = answers.bytecode() if compiled else answers.pattern()
    if pattern and (hit := _search(path, pattern)):
        yield Finding(FindingKind.BYTECODE if compiled else FindingKind.TEXT, found.path, hit)
    if compiled and (why := _stale(root, path)):
        yield Finding(FindingKind.STALE_BYTECODE, found.path, why)
    yield from Archives(answers).file(path, found.path)


def _search(path: Path, pattern: re.Pattern[bytes]) -> str:
    """Returns what a pattern finds first in a file; pieces overlap, so that nothing is cut in two."""
    before = b""
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            if match := pattern.search(before + data):
                return shown(match[0])
            before = (before + data)[-_OVERLAP:]
    return ""


def shown(data: bytes) -> str:
    """Returns the beginning of a match as text."""
    return repr(data[:60].decode(errors="replace"))


def _stale(root: Path, path: Path) -> str:
    """Returns why compiled Python is not of the source that lies beside it; empty when it is."""
    folder = path.parent.parent if path.parent.name == "__pycache__" else path.parent
    source = folder / f"{path.name.split('.')[0]}.py"
    if source.is_symlink() or not source.is_file():
        return "its source is not there"
    with path.open("rb") as file:
        head = file.read(_PYC_HEAD)
    checked_by_hash = len(head) == _PYC_HEAD and int.from_bytes(head[4:8], "little") & 1
    size = source.stat().st_size & 0xFFFFFFFF
    if not checked_by_hash and len(head) == _PYC_HEAD and int.from_bytes(head[12:16], "little") != size:
        return "it was compiled from another source than the one there"
    return ""
