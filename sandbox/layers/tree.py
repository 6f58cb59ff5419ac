"""The files of a layer: how they get into a draft, what they are made to be there, and their digest.

A layer has folders, files, links and, over another one, whiteouts (a name of the layer beneath that is gone)
and opaque folders (nothing of that folder beneath shows). Owners, times and set-id bits are no content:
everything belongs to the user of commands, who may so write beside any file, in the sandbox's own upper.
`/` and `/run` alone are root's, as the resident agent lies below them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox.backends.base import COMMAND_UID
from sandbox.errors import LayerError
from sandbox.layers.records import FORMAT, Config, Kind
from sandbox.trees import Item

OPAQUE = "trusted.overlay.opaque"
_ROOTS = frozenset({".", "run"})
_OPEN = frozenset({"tmp", "workspace"})
_PLACES = frozenset({"proc", "dev", "dev/shm", "sys", "run", "tmp", "workspace", "etc"})
"""Where a sandbox has something mounted, or may: a link there would lead a mount astray."""

_PLAIN = {"etc/ld.so.preload": "file", "run/tempering": "dir", "run/tempering.sock": "file"}
"""The same, a level deeper; there is no need for any of these."""

_EMPTY = ("proc", "sys", "dev")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """A path of a layer's tree, relative, with its own (not a link's target's) status."""

    path: str
    info: os.stat_result
    full: str

    @property
    def kind(self) -> str:
        """What it is: file, dir, link, whiteout or special."""
        mode = self.info.st_mode
        if stat.S_ISCHR(mode) and self.info.st_rdev == 0:
            return "whiteout"
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
        return kinds.get(stat.S_IFMT(mode), "special")

    @property
    def opaque(self) -> bool:
        """Whether it is a folder that hides the one beneath."""
        return self.kind == "dir" and OPAQUE in os.listxattr(self.full)


def walk(root: Path) -> Iterator[Found]:
    """Yields all of a tree, parents first and in order, through no link."""
    yield Found(".", os.lstat(root), str(root))
    folders = [("", str(root))]
    while folders:
        prefix, folder = folders.pop()
        inner: list[tuple[str, str]] = []
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            found = Found(prefix + name, os.lstat(os.path.join(folder, name)), os.path.join(folder, name))
            yield found
            if found.kind == "dir":
                inner.append((found.path + "/", found.full))
        folders += inner[::-1]


def write(items: Iterable[Item], root: Path) -> None:
    """Makes checked entries below a folder, which may hold earlier ones; links are made last.

    Raises:
        LayerError: One stands where another kind of thing is, or leads through a link.
    """
    links: list[tuple[Path, str]] = []
    last: dict[Path, tuple[int, int]] = {}
    for entry, data in items:
        path = root / entry.path
        if entry.path != ".":
            _parents(root, path)
        if entry.kind == "link":
            links.append((path, entry.target))
            continue
        last[path] = entry.mode, entry.mtime
        if entry.kind == "dir":
            _clear(path, keep_dir=True)
            path.mkdir(exist_ok=True)
            continue
        if not entry.at:
            _clear(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.seek(entry.at)
            file.write(data)
    for path, target in links:
        _clear(path)
        path.symlink_to(target)
    for path, (mode, mtime) in reversed(last.items()):
        path.chmod(mode)
        os.utime(path, ns=(mtime, mtime))


def _parents(root: Path, path: Path) -> None:
    """Makes the folders above a path, none of them a link: what is below one may be anywhere."""
    if path.parent == root:
        return
    _parents(root, path.parent)
    if path.parent.is_symlink():
        raise LayerError(f"{path.name!r} would go through the link {str(path.parent.relative_to(root))!r}")
    path.parent.mkdir(exist_ok=True)


def _clear(path: Path, *, keep_dir: bool = False) -> None:
    if path.is_dir() and not path.is_symlink():
        if keep_dir:
            return
        raise LayerError(f"{path.name!r} is a folder in the layer, and was to become a file")
    path.unlink(missing_ok=True)


def settle(root: Path, kind: Kind) -> None:
    """Makes a draft's tree what a layer has: owners, modes; nothing special, nothing where mounts go.

    Raises:
        LayerError: It has what no layer has, or a link where a sandbox mounts something.
    """
    for name in _EMPTY:
        if (root / name).is_dir() and not (root / name).is_symlink():
            _empty(root / name)
    for found in walk(root):
        if found.kind == "special" or (found.kind == "whiteout" and kind is Kind.BASE):
            raise LayerError(f"/{found.path} is a device, pipe or socket; no layer has one")
        if found.path in _PLACES and found.kind != "dir":
            raise LayerError(f"/{found.path} is no folder; a sandbox mounts something there or below")
        if found.kind not in (_PLAIN.get(found.path, found.kind), "whiteout"):
            raise LayerError(
                f"/{found.path} is a {found.kind}; a sandbox mounts a {_PLAIN[found.path]} there"
            )
        _settle(found)


def _empty(folder: Path) -> None:
    for inner in folder.iterdir():
        if inner.is_dir() and not inner.is_symlink():
            shutil.rmtree(inner)
        else:
            inner.unlink()


def _settle(found: Found) -> None:
    uid = 0 if found.path in _ROOTS else COMMAND_UID
    moved = os.geteuid() == 0 and (found.info.st_uid, found.info.st_gid) != (uid, uid)
    if moved:
        os.lchown(found.full, uid, uid)
    if found.kind in ("file", "dir"):
        mode = 0o1777 if found.path in _OPEN else found.info.st_mode & 0o755
        mode |= 0o700 if found.kind == "dir" else 0
        mode = 0o755 if found.path in _ROOTS else mode
        if moved or stat.S_IMODE(found.info.st_mode) != mode:  # a change of owner may clear bits
            os.chmod(found.full, mode)


def content(root: Path) -> Iterator[tuple[str, ...]]:
    """Yields what each path of a tree is, by name: path, kind, mode, and target or hash of its content."""
    for found in sorted(walk(root), key=lambda found: found.path):
        mode = format(stat.S_IMODE(found.info.st_mode), "o") if found.kind in ("file", "dir") else ""
        what = ""
        if found.kind == "file":
            what = _hash(found.full)
        elif found.kind == "link":
            what = os.readlink(found.full)
        elif found.opaque:
            what = "opaque"
        yield found.path, found.kind, mode, what


def _hash(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


def digest_of(root: Path, kind: Kind, config: Config, over: str) -> str:
    """Returns the digest of a layer with this tree: the same for the same content, however it is kept."""
    env = dict(sorted(config.env.items()))
    head = {"format": FORMAT, "kind": kind.value, "env": env, "workdir": config.workdir}
    digest = hashlib.sha256(json.dumps({**head, "user": config.user, "over": over}).encode())
    for line in content(root):
        digest.update(json.dumps(line).encode() + b"\n")
    return f"sha256:{digest.hexdigest()}"


def totals(root: Path) -> tuple[int, int]:
    """Returns how many bytes of files and how many entries a tree has."""
    size = entries = 0
    for found in walk(root):
        entries += 1
        size += found.info.st_size if found.kind == "file" else 0
    return size, entries
