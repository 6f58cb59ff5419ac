"""The target of a task among installed packages and caches, in a version newer than the task's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sandbox.layers.answers import Answers
from sandbox.layers.tree import Found

CACHES = (
    ".cache/pip", ".cache/uv", ".cache/pypoetry", ".npm/_cacache", ".cache/yarn", ".yarn/cache",
    "pkg/mod/cache", ".cache/go-build", ".cargo/registry", ".m2/repository", ".gradle/caches",
)  # fmt: skip
_DIST = re.compile(
    r"(?:^|/)([A-Za-z0-9._-]+?)-([0-9][A-Za-z0-9.!+_]*?)"
    r"(?:\.dist-info|\.egg-info|-py[23].*|-cp.*|\.tar\.gz|\.zip|$)"
)
_GO = re.compile(r"(?:^|/)([^@]+)@v([0-9][^/]*)(?:/|$)")
_METADATA = re.compile(rb"^Name: (\S+)$.*?^Version: (\S+)$|^Version: (\S+)$.*?^Name: (\S+)$", re.M | re.S)
_MOST = 1 << 20


def newer(answers: Answers, name: str, version: str) -> str:
    """Returns what to say of a package when it is the target in a newer version; empty otherwise."""
    if not answers.package or _plain(name) != _plain(answers.package):
        return ""
    if answers.version and not _key(version) > _key(answers.version):
        return ""
    return f"{name} {version}, and the task has {answers.version or 'none'}"


def newer_in_path(found: Found, answers: Answers) -> str:
    """Returns what to say of a file or folder that is, or describes, the target in a newer version."""
    if not answers.package:
        return ""
    path = Path(found.full)
    if (match := _GO.search(found.path)) and (said := newer(answers, _go_name(match[1], answers), match[2])):
        return said
    if found.kind == "file" and path.name == "package.json" and found.info.st_size < _MOST:
        return _of_package_json(path.read_bytes(), answers)
    if found.kind == "file" and path.name in ("METADATA", "PKG-INFO") and found.info.st_size < _MOST:
        return _of_metadata(path.read_bytes(), answers)
    if match := _DIST.search(found.path):
        return newer(answers, match[1], match[2])
    return ""


def newer_in_archive(name: str, data: bytes, answers: Answers) -> str:
    """Returns what to say of a member of an archive that describes the target in a newer version."""
    last = name.rpartition("/")[2]
    if last == "package.json" and len(data) < _MOST:
        return _of_package_json(data, answers)
    if last in ("METADATA", "PKG-INFO") and len(data) < _MOST:
        return _of_metadata(data, answers)
    return ""


def _of_package_json(data: bytes, answers: Answers) -> str:
    try:
        about: object = json.loads(data)
    except ValueError:
        return ""
    if not isinstance(about, dict):
        return ""
    name, version = about.get("name"), about.get("version")  # pyright: ignore
    return newer(answers, name, version) if isinstance(name, str) and isinstance(version, str) else ""


def _of_metadata(data: bytes, answers: Answers) -> str:
    if not (match := _METADATA.search(data)):
        return ""
    name, version = (match[1], match[2]) if match[1] else (match[4], match[3])
    return newer(answers, name.decode(errors="replace"), version.decode(errors="replace"))


def _go_name(path: str, answers: Answers) -> str:
    """Returns the module's name if the path ends with it; caches write a capital as `!` and a small one."""
    plain = re.sub(r"!(\w)", lambda match: match[1].upper(), path)
    return answers.package if plain.endswith(answers.package) else plain


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _key(version: str) -> list[tuple[int, int, str]]:
    """Returns what orders versions: numbers by value, a letter (a1, rc) before the number it precedes."""
    parts = re.findall(r"\d+|[a-z]+", version.lower().removeprefix("v").partition("+")[0])
    while parts and parts[-1] == "0":
        parts.pop()
    return [*((1, int(part), "") if part.isdigit() else (-1, 0, part) for part in parts), (0, 0, "")]
