"""What a sandbox changed in its composed root: the upper folder as a tree, and the names that are gone.

The folder is read by the node, as root, while background processes of the sandbox may still write to it:
every step is relative to an open folder and follows no link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from sandbox.errors import FileError
from sandbox.layers.tree import OPAQUE
from sandbox.layers.writable import Writable
from sandbox.trees import PIECE, Entry, TreeLimits, encode

_OURS = ("proc", "dev", "sys", "run/tempering", "etc/ld.so.preload")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_DEPTH = 120


class Upper:
    """One pass over an upper folder. While `pack` runs `gone` fills: what to remove before unpacking."""

    def __init__(self, writable: Writable, limits: TreeLimits):
        self._writable, self._limits = writable, limits
        self._entries = self._bytes = 0
        self.gone: list[str] = []

    def pack(self) -> Iterator[bytes]:
        """Yields the bytes of the entries, as the agent packs a tree (`agent/files.py`), relative to `/`.

        Raises:
            FileError: There is too much, or it cannot be read.
        """
        try:
            fd = os.open(self._writable.upper, _FOLDER)
        except OSError as error:
            raise FileError(f"the files of the sandbox cannot be reached: {error}") from error
        try:
            yield from self._folder(fd, self._writable.at, 0)
        except OSError as error:
            raise FileError(f"the files of the sandbox cannot be read: {error}") from error
        finally:
            os.close(fd)

    def _folder(self, fd: int, prefix: str, depth: int, fresh: bool = False) -> Iterator[bytes]:
        if depth > _MAX_DEPTH:
            raise FileError(f"the sandbox has folders more than {_MAX_DEPTH} deep")
        for name in sorted(os.listdir(fd)):
            path = f"{prefix}/{name}" if prefix else name
            if path in _OURS:
                continue
            try:
                yield from self._entry(fd, name, path, depth, fresh)
            except FileNotFoundError:  # a process of the sandbox removed it meanwhile
                continue

    def _entry(self, fd: int, name: str, path: str, depth: int, fresh: bool) -> Iterator[bytes]:
        """Yields an entry and what is below it. `fresh`: a folder above is made anew, nothing is beneath."""
        info = os.lstat(name, dir_fd=fd)
        self._count(info)
        if stat.S_ISCHR(info.st_mode):
            if info.st_rdev == 0 and not fresh:
                self.gone.append(path)
            return
        beneath = None if fresh else self._beneath(path)
        mode, mtime = stat.S_IMODE(info.st_mode), max(info.st_mtime_ns, 0)
        if stat.S_ISDIR(info.st_mode):
            inner = os.open(name, _FOLDER, dir_fd=fd)
            try:
                new = beneath == "other" or (beneath == "dir" and OPAQUE in os.listxattr(inner))
                if new:
                    self.gone.append(path)
                yield encode(Entry(path, "dir", mode, mtime), b"")
                yield from self._folder(inner, path, depth + 1, fresh or new or beneath is None)
            finally:
                os.close(inner)
            return
        if beneath == "dir":
            self.gone.append(path)
        if stat.S_ISLNK(info.st_mode):
            yield encode(Entry(path, "link", target=os.readlink(name, dir_fd=fd)), b"")
        elif stat.S_ISREG(info.st_mode):
            yield from self._file(fd, name, Entry(path, "file", mode, mtime))

    def _count(self, info: os.stat_result) -> None:
        self._entries += 1
        self._bytes += info.st_size if stat.S_ISREG(info.st_mode) else 0
        if self._entries > self._limits.entries or self._bytes > self._limits.size:
            raise FileError(f"more than {self._limits.entries} entries or {self._limits.size} bytes")

    def _file(self, fd: int, name: str, entry: Entry) -> Iterator[bytes]:
        with open(os.open(name, _FILE, dir_fd=fd), "rb") as file:
            left, at = os.fstat(file.fileno()).st_size, 0
            while True:
                data = file.read(min(left, PIECE))
                piece = Entry(entry.path, "file", entry.mode, entry.mtime, len(data), at)
                yield encode(piece, data)
                at, left = at + len(data), left - len(data)
                if not left or not data:
                    return

    def _beneath(self, path: str) -> str | None:
        """Returns what the layers have at a path: `dir`, `other`, or None."""
        inner = path.removeprefix(self._writable.at).lstrip("/")
        for tree in self._writable.trees:
            try:
                mode = os.lstat(tree / inner).st_mode
            except (FileNotFoundError, NotADirectoryError):
                continue
            return "dir" if stat.S_ISDIR(mode) else None if stat.S_ISCHR(mode) else "other"
        return None
