"""What COPY and ADD bring from the folder of a Dockerfile into the root that is being built."""

from __future__ import annotations

import fnmatch
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from sandbox.archives import read_archive
from sandbox.errors import SandboxError
from sandbox.layers.dockerfile import Step
from sandbox.layers.inside import inside
from sandbox.layers.tree import write
from sandbox.trees import Item, TreeLimits, read_tree

LIMITS = TreeLimits(64 << 30, 2_000_000)


class Context:
    """The folder that a build may read from, less what its `.dockerignore` leaves out."""

    def __init__(self, folder: Path):
        self._folder = folder.resolve()
        ignore = self._folder / ".dockerignore"
        lines = ignore.read_text().splitlines() if ignore.is_file() else []
        self._rules = [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    def copy(self, step: Step, words: list[str], root: Path, workdir: str) -> None:
        """Copies what a COPY or ADD names into a root.

        Raises:
            LayerError: There is no such source, or it leads out of the context.
        """
        if len(words) < 2:
            raise step.error("name a source and where it goes")
        *patterns, to = words
        sources = [path for pattern in patterns for path in self._find(step, pattern)]
        place = inside(root, to if to.startswith("/") else f"{workdir}/{to}")
        into = to.endswith("/") or to in (".", "..") or len(sources) > 1 or (root / place).is_dir()
        for source in sources:
            try:
                self._copy(step, source, root, place, into)
            except (SandboxError, OSError) as error:
                raise step.error(f"{source.name}: {error}") from error

    def _find(self, step: Step, pattern: str) -> list[Path]:
        if "://" in pattern or pattern.startswith("git@"):
            raise step.error(f"{pattern} is not here: nothing is fetched; put the file beside the Dockerfile")
        parts = [part for part in PurePosixPath(pattern.lstrip("/") or ".").parts if part != "."]
        if ".." in parts:
            raise step.error(f"{pattern!r} leads out of the folder of the build")
        found = sorted(self._folder.glob("/".join(parts))) if parts else [self._folder]
        found = [path for path in found if path == self._folder or not self._ignored(path)]
        for path in found:
            if not path.resolve().is_relative_to(self._folder):
                raise step.error(f"{pattern!r} leads out of the folder of the build")
        if not found:
            raise step.error(f"there is no {pattern!r} in {self._folder}")
        return found

    def _copy(self, step: Step, source: Path, root: Path, place: str, into: bool) -> None:
        if source.is_file() and step.name == "ADD" and tarfile.is_tarfile(source):
            items: Iterator[Item] = read_archive(source, LIMITS, links_out=True)
            prefix = place
        elif source.is_dir() and not source.is_symlink():
            items, prefix = self._tree(source), place
        else:
            prefix = f"{place}/{source.name}" if into else place
            items = read_tree(source.resolve(), LIMITS, links_out=True)
        mode = int(step.flags["chmod"], 8) if step.flags.get("chmod") else None
        write(_placed(items, root, prefix, mode), root)

    def _tree(self, source: Path) -> Iterator[Item]:
        for entry, data in read_tree(source, LIMITS, links_out=True):
            if entry.path != "." and self._ignored(source / entry.path):
                continue
            yield entry, data

    def _ignored(self, path: Path) -> bool:
        name, out = path.relative_to(self._folder).as_posix(), False
        for rule in self._rules:
            pattern = rule.lstrip("!").strip("/")
            tries = [name, *(str(parent) for parent in PurePosixPath(name).parents if str(parent) != ".")]
            bare = pattern.removeprefix("**/")
            if any(
                fnmatch.fnmatch(one, pattern) or (bare != pattern and fnmatch.fnmatch(one, bare))
                for one in tries
            ):
                out = not rule.startswith("!")
        return out


def _placed(items: Iterator[Item], root: Path, prefix: str, mode: int | None) -> Iterator[Item]:
    """Yields entries at their place in a root, in which folders may be links to others."""
    for entry, data in items:
        path = prefix if entry.path == "." else f"{prefix}/{entry.path}"
        folder, _, name = path.rpartition("/")
        path = inside(root, path) if entry.kind == "dir" else f"{inside(root, folder)}/{name}".lstrip("/")
        if path:
            change = {"mode": mode} if mode is not None and entry.kind == "file" else {}
            yield replace(entry, path=path, **change), data
