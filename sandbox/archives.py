"""Archives that somebody gave us, as trees: tar and zip, bombs refused by size and ratio."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from sandbox.errors import UnsafeTreeError
from sandbox.trees import Checker, Entry, Item, TreeLimits, pieces

MAX_RATIO, _FREE = 200, 8 << 20
"""How many times its size an archive may unpack to, beyond the first `_FREE` bytes."""

_DICTIONARY = 80 << 20
"""Memory for unpacking an xz, enough for what its strongest preset makes; a header can ask for gigabytes."""

_SAID = 1 << 20
"""Bytes that a tar may say about one entry, its name among them, beside its header."""

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)


def read_archive(archive: Path | bytes, limits: TreeLimits, *, links_out: bool = False) -> Iterator[Item]:
    """Yields the entries of an archive, each checked before it is given. `links_out`: links may lead out.

    Raises:
        UnsafeTreeError: It is broken, a bomb, or has what does not go into a sandbox.
    """
    with open(archive, "rb") if isinstance(archive, Path) else io.BytesIO(archive) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        most = min(limits.size, max(_FREE, MAX_RATIO * size))
        checker = Checker(TreeLimits(most, limits.entries), links_out)
        try:
            if zipfile.is_zipfile(file):
                yield from _zip(file, checker, most)
            else:
                with _plain(file, most + (limits.entries << 11)) as plain:
                    yield from _tar(plain, checker)
        except UnsafeTreeError:
            raise
        except _BROKEN as error:
            raise UnsafeTreeError(f"the archive cannot be read: {error}") from error


def _plain(file: IO[bytes], most: int) -> IO[bytes]:
    """Returns the archive unpacked; one of more than `most` bytes is refused before they are made."""
    file.seek(0)
    start = file.read(6)
    file.seek(0)
    opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), _as_it_is)
    plain, done = tempfile.TemporaryFile(), 0  # noqa: SIM115 (the caller's to close)
    try:
        for data in opener(file):
            done += len(data)
            if done > most:
                raise UnsafeTreeError(f"the archive unpacks to more than {most} bytes")
            plain.write(data)
        plain.seek(0)
    except BaseException:
        plain.close()
        raise
    return plain


def _as_it_is(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(1 << 18):
        yield data


def _unxz(file: IO[bytes]) -> Iterator[bytes]:
    """Yields what an xz holds, one stream after the other, without the memory that its header asks for."""
    rest = b""
    while rest or (rest := file.read(1 << 16)):
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DICTIONARY)
        while not stream.eof:
            data = b""
            if stream.needs_input and not (data := rest or file.read(1 << 16)):
                raise EOFError("it ends in the middle")
            rest = b"" if data else rest
            yield stream.decompress(data, 1 << 18)
        rest = stream.unused_data.lstrip(b"\0")


_OPENERS: dict[bytes, Callable[[IO[bytes]], Iterator[bytes]]] = {
    b"\x1f\x8b": lambda file: _as_it_is(cast("IO[bytes]", gzip.open(file))),  # noqa: SIM115
    b"BZh": lambda file: _as_it_is(cast("IO[bytes]", bz2.open(file))),  # noqa: SIM115
    b"\xfd7zXZ": _unxz,
}


class _Pieces:
    """A file of which little is read at once, as `tarfile` takes whole what is said of an entry."""

    def __init__(self, file: IO[bytes]):
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        """Reads a piece."""
        if not 0 <= size <= _SAID:
            raise UnsafeTreeError(f"the archive says {size} bytes about an entry, which is not 0 to {_SAID}")
        return self._file.read(size)


def _tar(file: IO[bytes], checker: Checker) -> Iterator[Item]:
    with tarfile.open(fileobj=cast("IO[bytes]", _Pieces(file)), mode="r:") as tar:
        for member in tar:
            name = member.name[2:] if member.name.startswith("./") else member.name
            kind = (
                "file"
                if member.isreg()
                else "dir"
                if member.isdir()
                else "link"
                if member.issym()
                else "special"
            )
            entry = Entry(
                name,
                kind,
                member.mode,
                max(int(member.mtime), 0) * 10**9,
                target=member.linkname if kind == "link" else "",
            )
            if kind != "file":
                yield checker.check(entry), b""
                continue
            _declared(name, member.size, checker)
            content = tar.extractfile(member)
            assert content is not None
            yield from pieces(content, entry, checker)


def _zip(file: IO[bytes], checker: Checker, most: int) -> Iterator[Item]:
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > most:
            raise UnsafeTreeError(f"the archive unpacks to more than {most} bytes")
        for member in archive.infolist():
            mode = member.external_attr >> 16
            form = stat.S_IFMT(mode)
            name = member.filename.rstrip("/") if member.is_dir() else member.filename
            kind = "dir" if member.is_dir() else "link" if form == stat.S_IFLNK else "file"
            if form not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                kind = "special"
            if member.flag_bits & 1 or member.compress_type not in _METHODS:
                raise UnsafeTreeError(
                    f"{name!r} is encrypted, or packed by a method that is not unpacked here"
                )
            entry = Entry(name, kind, mode or 0o644)
            if kind == "link":
                target = archive.open(member).read(4096).decode(errors="surrogateescape")
                yield checker.check(Entry(name, "link", target=target)), b""
            elif kind != "file":
                yield checker.check(entry), b""
            else:
                with archive.open(member) as content:
                    yield from pieces(content, entry, checker)


def _declared(name: str, size: int, checker: Checker) -> None:
    if not 0 <= size <= checker.limits.size:
        raise UnsafeTreeError(f"{name!r} declares {size} bytes, which is not 0 to {checker.limits.size}")
