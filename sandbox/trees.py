"""Trees of files on their way into and out of a sandbox, believed in nothing.

The bytes are those of `agent/files.py`: entries of a JSON object and content. `Checker` holds for both ways:
no absolute path, no `..`, nothing through a link, no link that leads out, no entry twice, only files, folders
and links, no more entries and bytes than allowed. Set-id bits are dropped.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from sandbox.errors import ProtocolError, UnsafeTreeError

PIECE = 1 << 20
BATCH = 4 << 20
_LENGTH = struct.Struct("!I")
_MAX_OBJECT, _MAX_PATH, _MAX_DEPTH = 1 << 16, 4096, 128
_MAX_MTIME = 1 << 62
_KINDS = ("file", "dir", "link")


@dataclass(frozen=True, slots=True)
class Entry:
    """A piece of a file (`size` bytes from `at`), a folder or a link, relative to the root, which is `.`."""

    path: str
    kind: str
    mode: int = 0o644
    mtime: int = 0
    size: int = 0
    at: int = 0
    target: str = ""


Item = tuple[Entry, bytes]


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """What a tree may add up to."""

    size: int = 256 << 20
    entries: int = 50_000


@dataclass(slots=True)
class Checker:
    """Lets entries pass one after the other, or refuses the tree. `links_out`: links may lead anywhere."""

    limits: TreeLimits
    links_out: bool = False
    _sizes: dict[str, int] = field(default_factory=dict[str, int])
    _folders: set[str] = field(default_factory=lambda: {"."})
    _total: int = 0

    def check(self, entry: Entry) -> Entry:
        """Returns the entry, its mode reduced to permissions.

        Raises:
            UnsafeTreeError: The tree is not to be unpacked; says which entry, and why.
        """
        path = self._path(entry)
        if not 0 <= entry.mtime < _MAX_MTIME:
            raise UnsafeTreeError(f"{path[:200]!r} was changed at no time that a file can have")
        self._total += entry.size
        if self._total > self.limits.size:
            raise UnsafeTreeError(f"the tree has more than {self.limits.size} bytes")
        if entry.kind == "dir" and path in self._folders and path not in self._sizes:
            pass
        elif path in self._sizes and not (entry.kind == "file" and 0 < entry.at == self._sizes[path]):
            raise UnsafeTreeError(f"{path!r} is there twice")
        elif path not in self._sizes and entry.at:
            raise UnsafeTreeError(f"{path!r} does not begin at its beginning")
        if entry.kind == "link" and not self.links_out:
            self._link(path, entry.target)
        self._sizes[path] = entry.at + entry.size if entry.kind == "file" else -1
        if len(self._sizes) > self.limits.entries:
            raise UnsafeTreeError(f"the tree has more than {self.limits.entries} entries")
        return Entry(path, entry.kind, entry.mode & 0o777, entry.mtime, entry.size, entry.at, entry.target)

    def _path(self, entry: Entry) -> str:
        path, parts = entry.path, entry.path.split("/")
        if entry.kind not in _KINDS:
            raise UnsafeTreeError(f"{path[:200]!r} is neither a file nor a folder nor a link: {entry.kind}")
        if path != "." and (not path or path.startswith("/") or {"", ".", ".."} & set(parts)):
            raise UnsafeTreeError(f"{path[:200]!r} is not a path inside the tree")
        if "\0" in path or len(path) > _MAX_PATH or len(parts) > _MAX_DEPTH:
            raise UnsafeTreeError(f"{path[:200]!r} is no path, or too long or deep")
        for count in range(1, len(parts)):
            parent = "/".join(parts[:count])
            if parent in self._sizes and parent not in self._folders:
                raise UnsafeTreeError(f"{path!r} goes through {parent!r}, which is no folder")
            self._folders.add(parent)
        if path in self._folders and path != "." and entry.kind != "dir":
            raise UnsafeTreeError(f"{path!r} is a folder already")
        if entry.kind == "dir":
            self._folders.add(path)
        return path

    def _link(self, path: str, target: str) -> None:
        # No `..` behind a name: what the name leads to may be another link, and its parent anywhere.
        names = target.split("/")
        ups = next((place for place, name in enumerate(names) if name != ".."), len(names))
        if (
            path == "."
            or not target
            or target.startswith("/")
            or "\0" in target
            or ups > path.count("/")
            or ".." in names[ups:]
        ):
            raise UnsafeTreeError(f"the link {path!r} leads out of the tree, to {target[:200]!r}")


def encode(entry: Entry, data: bytes) -> bytes:
    """Returns an entry as bytes."""
    text = json.dumps(asdict(entry)).encode()
    return _LENGTH.pack(len(text)) + text + data


@dataclass(slots=True)
class Parser:
    """Entries out of the bytes that a sandbox sends."""

    _pending: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[Item]:
        """Takes the next bytes; yields the entries that are whole.

        Raises:
            ProtocolError: They are none.
        """
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > _MAX_OBJECT:
                raise ProtocolError(f"an entry of a tree announces {length} bytes about itself")
            start = _LENGTH.size + length
            if len(self._pending) < start:
                return
            entry = _entry(bytes(self._pending[_LENGTH.size : start]))
            if len(self._pending) < start + entry.size:
                return
            content = bytes(self._pending[start : start + entry.size])
            del self._pending[: start + entry.size]
            yield entry, content

    def end(self) -> None:
        """Says that no more comes.

        Raises:
            ProtocolError: An entry is cut short.
        """
        if self._pending:
            raise ProtocolError("a tree ends in the middle of an entry")


def _entry(text: bytes) -> Entry:
    try:
        raw: object = json.loads(text)
        fields = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        entry = Entry(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError("an entry of a tree is not what it should be") from error
    numbers = (entry.mode, entry.mtime, entry.size, entry.at)
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) or entry.size > PIECE:
        raise ProtocolError("an entry of a tree has numbers out of range")
    if not all(type(text) is str for text in (entry.path, entry.kind, entry.target)):
        raise ProtocolError("an entry of a tree has names that are none")
    return entry


def batches(items: Iterable[Item]) -> Iterator[bytes]:
    """Yields the bytes of entries, some megabytes at a time."""
    batch = bytearray()
    for entry, data in items:
        batch += encode(entry, data)
        if len(batch) >= BATCH:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)


def read_tree(
    root: Path, limits: TreeLimits, *, links_out: bool = False, skip: Collection[str] = ()
) -> Iterator[Item]:
    """Yields the entries of a local file or folder. `links_out`: links may lead anywhere.

    What is below the folders `skip` is left out.

    Raises:
        UnsafeTreeError: It has what does not go into a sandbox.
    """
    checker = Checker(limits, links_out)
    for path in _walk(root, {root / name for name in skip}):
        info = path.lstat()
        name = path.relative_to(root).as_posix()
        kind = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}.get(
            stat.S_IFMT(info.st_mode)
        )
        target = os.readlink(path) if kind == "link" else ""
        entry = Entry(name, kind or "special", info.st_mode, max(info.st_mtime_ns, 0), target=target)
        if kind != "file":
            yield checker.check(entry), b""
            continue
        with path.open("rb") as file:
            yield from pieces(file, entry, checker)


def pieces(file: Any, entry: Entry, checker: Checker) -> Iterator[Item]:
    """Yields the entries of one file from its open stream."""
    at = 0
    while (data := file.read(PIECE)) or not at:
        piece = Entry(entry.path, "file", entry.mode, entry.mtime, len(data), at)
        yield checker.check(piece), data
        at += len(data)
        if not data:
            return


def _walk(path: Path, skip: Collection[Path] = ()) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink() and path not in skip:
        for inner in sorted(path.iterdir()):
            yield from _walk(inner, skip)


class TreeWriter:
    """Makes a tree beside where it is to be, and moves it there when it is whole. Links are made last."""

    def __init__(self, to: Path, limits: TreeLimits):
        if to.exists() or to.is_symlink():
            raise UnsafeTreeError(f"{to} is there already: name a path that is not")
        self._to, self._checker, self._parser = to, Checker(limits), Parser()
        self._scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
        self._root = self._scratch / "tree"
        self._links: list[Entry] = []

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream.

        Raises:
            UnsafeTreeError: The tree is not to be unpacked.
            ProtocolError: The bytes are none of a tree.
        """
        for entry, content in self._parser.feed(data):
            self._make(self._checker.check(entry), content)

    def _make(self, entry: Entry, content: bytes) -> None:
        path = self._root / entry.path
        if entry.kind == "link":
            self._links.append(entry)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.kind == "dir":
            path.mkdir(exist_ok=True)
            return
        new = os.O_EXCL | os.O_CREAT if not entry.at else 0
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | new, 0o600)
        with open(fd, "wb") as file:
            file.seek(entry.at)
            file.write(content)
            os.fchmod(fd, entry.mode | 0o600)
        os.utime(path, ns=(entry.mtime, entry.mtime))

    def finish(self) -> None:
        """Moves the tree to its place."""
        self._parser.end()
        for entry in self._links:
            path = self._root / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(entry.target)
        self._root.rename(self._to)
        self.discard()

    def discard(self) -> None:
        """Removes what was made."""
        shutil.rmtree(self._scratch, ignore_errors=True)
