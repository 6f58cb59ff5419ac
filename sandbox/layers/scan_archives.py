"""Answers inside archives: wheels, jars, zips, tars, compressed files, and those inside one another."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sandbox.layers.answers import Answers, Finding, FindingKind
from sandbox.layers.scan_packages import newer_in_archive

_DEPTH, _MEMBERS = 4, 200_000
_MOST = 512 << 20
"""What one file may unpack to, all that is inside it together, before it counts as unreadable."""

_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_BROKEN = (
    tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, RuntimeError,
    NotImplementedError, ValueError,
)  # fmt: skip
_ZIP, _TAR, _TAR_AT = b"PK\x03\x04", b"ustar", 257


class Archives:
    """Scans one file, if it is an archive, with a budget of bytes and depth."""

    def __init__(self, answers: Answers):
        self._answers = answers
        self._plain, self._compiled = answers.pattern(), answers.bytecode()
        self._left = _MOST

    def file(self, path: Path, name: str) -> Iterator[Finding]:
        """Yields the findings in a file, under the name that it has in the layer."""
        with path.open("rb") as file:
            yield from self._open(file, name, 0)

    def _open(self, file: IO[bytes], name: str, depth: int) -> Iterator[Finding]:
        start = file.read(_TAR_AT + len(_TAR))
        file.seek(0)
        opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
        if opener is None and not start.startswith(_ZIP) and start[_TAR_AT:] != _TAR:
            return
        if depth >= _DEPTH:
            yield Finding(FindingKind.UNREADABLE, name, f"archives more than {_DEPTH} deep in one another")
            return
        try:
            if start.startswith(_ZIP):
                yield from self._zip(file, name, depth)
            elif opener:
                data = self._read(opener(file))
                yield from self._member(data, name, name.rpartition(".")[0] or name, depth)
            else:
                yield from self._tar(file, name, depth)
        except _BROKEN as error:
            yield Finding(
                FindingKind.UNREADABLE, name, f"it looks like an archive, and is none: {error}"[:200]
            )

    def _read(self, file: IO[bytes]) -> bytes:
        data = file.read(self._left + 1)
        if len(data) > self._left:
            raise ValueError(f"it unpacks to more than {_MOST} bytes")
        self._left -= len(data)
        return data

    def _zip(self, file: IO[bytes], name: str, depth: int) -> Iterator[Finding]:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _count(members)
            for member in members:
                with archive.open(member) as content:
                    data = self._read(content)
                yield from self._member(data, f"{name}!{member.filename}", member.filename, depth)

    def _tar(self, file: IO[bytes], name: str, depth: int) -> Iterator[Finding]:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            members = archive.getmembers()
            _count(members)
            for member in members:
                content = archive.extractfile(member) if member.isreg() else None
                data = self._read(content) if content else member.linkname.encode()
                yield from self._member(data, f"{name}!{member.name}", member.name, depth)

    def _member(self, data: bytes, full: str, name: str, depth: int) -> Iterator[Finding]:
        pattern = self._compiled if name.endswith((".pyc", ".pyo")) else self._plain
        if pattern and (match := pattern.search(data) or pattern.search(name.encode())):
            yield Finding(FindingKind.ARCHIVE, full, repr(match[0][:60].decode(errors="replace")))
        last = name.rpartition("/")[2]
        if any(Path(name).match(one) or Path(last).match(one) for one in self._answers.names):
            yield Finding(FindingKind.ARCHIVE, full, "the name is an answer's")
        if newer := newer_in_archive(name, data, self._answers):
            yield Finding(FindingKind.NEWER_PACKAGE, full, newer)
        yield from self._open(io.BytesIO(data), full, depth + 1)


def _count(members: list[Any]) -> None:
    if len(members) > _MEMBERS:
        raise ValueError(f"it has {len(members)} members")
