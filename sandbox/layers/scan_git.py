"""Answers in git repositories: in every object, reachable or not, and what tells of another history.

Objects are read by git from an empty repository of ours that only borrows them, so that no configuration or
hook of the scanned one has a say.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from sandbox.errors import LayerError
from sandbox.layers.answers import Answers, Finding, FindingKind
from sandbox.layers.tree import walk

_HEX = re.compile(r"[0-9a-f]{40,64}")
_FULL = 64 << 20
_CLEAN = "`layer build --clean-git` starts over"
_PLACES = {
    FindingKind.GIT_TAG: ("refs/tags",),
    FindingKind.GIT_REMOTE: ("refs/remotes",),
    FindingKind.GIT_STASH: ("refs/stash",),
    FindingKind.GIT_REFLOG: ("logs",),
}


def repositories(root: Path) -> list[Path]:
    """Returns the git folders of a tree, bare ones and those of submodules and worktrees included."""
    found: list[Path] = []
    for entry in walk(root):
        path = Path(entry.full)
        if entry.kind == "dir" and (path / "HEAD").is_file() and (path / "objects").is_dir():
            found.append(path)
    return found


def scan_git(root: Path, repository: Path, answers: Answers) -> Iterator[Finding]:
    """Yields the findings in one repository."""
    where = repository.relative_to(root).as_posix()
    yield from _other_history(repository, where)
    if (repository / "objects/info/alternates").exists():
        yield Finding(FindingKind.GIT_REMOTE, f"{where}/objects/info/alternates", "borrows others' objects")
    try:
        yield from _objects(repository, where, answers)
    except (OSError, LayerError, ValueError) as error:
        yield Finding(FindingKind.UNREADABLE, where, f"git cannot read its objects: {error}"[:300])


def _other_history(repository: Path, where: str) -> Iterator[Finding]:
    packed = repository / "packed-refs"
    names = packed.read_text(errors="replace").split() if packed.is_file() else []
    for kind, places in _PLACES.items():
        for place in places:
            path = repository / place
            files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
            count = len([one for one in files if one.stat().st_size]) + len(
                [name for name in names if name == place or name.startswith(f"{place}/")]
            )
            if count:
                yield Finding(kind, f"{where}/{place}", f"{count} of them; {_CLEAN}")
    config = repository / "config"
    if config.is_file() and re.search(r"^\s*\[\s*remote\b", config.read_text(errors="replace"), re.M | re.I):
        yield Finding(FindingKind.GIT_REMOTE, f"{where}/config", "names a remote")


def _objects(repository: Path, where: str, answers: Answers) -> Iterator[Finding]:
    pattern, commits = answers.pattern(), 0
    with tempfile.TemporaryDirectory() as scratch:
        borrowed = _borrow(repository, Path(scratch))
        reachable = _reachable(borrowed, repository)
        for name, kind, data in _all_objects(borrowed):
            commits += kind == "commit"
            path = f"{where}!{name}"
            if name not in reachable:
                yield Finding(FindingKind.GIT_UNREACHABLE, path, f"a {kind} that the branch does not lead to")
            hit = pattern.search(data) if pattern else None
            if hit is None and kind == "tree":
                hit = _name_in_tree(data, answers)
            if hit is not None:
                found = hit if isinstance(hit, str) else repr(hit[0][:60].decode(errors="replace"))
                yield Finding(FindingKind.GIT_OBJECT, path, f"in a {kind}: {found}")
    if commits > 1:
        yield Finding(FindingKind.GIT_HISTORY, where, f"{commits} commits; {_CLEAN}")


def _name_in_tree(data: bytes, answers: Answers) -> str | None:
    for match in re.finditer(rb"\d{5,6} ([^\0]+)\0", data):
        name = match[1].decode(errors="replace")
        if any(fnmatchcase(name, one.rpartition("/")[2]) for one in answers.names):
            return f"the name {name!r}"
    return None


def _borrow(repository: Path, scratch: Path) -> Path:
    """Returns an empty repository that has the objects of another."""
    borrowed = scratch / "git"
    done = subprocess.run(
        ["git", "init", "--quiet", "--bare", str(borrowed)],
        capture_output=True,
        env=environment(),
        check=False,
    )
    if done.returncode:
        raise LayerError(done.stderr.decode(errors="replace").strip())
    (borrowed / "objects/info").mkdir(exist_ok=True)
    (borrowed / "objects/info/alternates").write_text(f"{repository.resolve() / 'objects'}\n")
    return borrowed


def _reachable(borrowed: Path, repository: Path) -> set[str]:
    """Returns the objects that the current branch leads to."""
    head = (repository / "HEAD").read_text(errors="replace").strip()
    if head.startswith("ref: "):
        head = _resolve(repository, head.removeprefix("ref: "))
    if not _HEX.fullmatch(head):
        return set()
    listed = subprocess.run(
        ["git", "--git-dir", str(borrowed), "rev-list", "--objects", head],
        capture_output=True, env=environment(), check=False,
    )  # fmt: skip
    if listed.returncode:
        raise LayerError(listed.stderr.decode(errors="replace").strip())
    return {line.split(b" ")[0].decode() for line in listed.stdout.splitlines()}


def _resolve(repository: Path, name: str) -> str:
    path = repository / name
    if ".." not in name and path.is_file() and not path.is_symlink():
        return path.read_text(errors="replace").strip()
    packed = repository / "packed-refs"
    for line in packed.read_text(errors="replace").splitlines() if packed.is_file() else ():
        if line.endswith(f" {name}"):
            return line.split(" ")[0]
    return ""


def _all_objects(borrowed: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yields every object: its name, its kind, its bytes (of a huge one, the beginning)."""
    command = ["git", "--git-dir", str(borrowed), "cat-file", "--batch-all-objects", "--batch", "--unordered"]
    with tempfile.TemporaryFile() as problems:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=problems, env=environment())
        assert process.stdout is not None
        try:
            while head := process.stdout.readline():
                name, kind, size = head.decode().split()
                data = _take(process.stdout, int(size))
                yield name, kind, data
        finally:
            process.stdout.close()
            process.kill()
            process.wait()
        problems.seek(0)
        if said := problems.read(500).decode(errors="replace").strip():
            raise LayerError(said)


def _take(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(min(size, _FULL))
    left = size - len(data)
    while left:
        left -= len(stream.read(min(left, 1 << 20)) or b"\0" * left)
    stream.read(1)
    return data


def environment() -> dict[str, str]:
    """Returns the environment of a git that reads no configuration but that of its repository."""
    return {
        "PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0",
    }  # fmt: skip
