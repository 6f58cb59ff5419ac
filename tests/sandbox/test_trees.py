"""Trees and archives that somebody hostile made: refused or neutralised, before anything is written."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.archives import read_archive
from sandbox.errors import ProtocolError, UnsafeTreeError
from sandbox.trees import Checker, Entry, Parser, TreeLimits, TreeWriter, batches, encode, read_tree

LIMITS = TreeLimits(size=20 << 20, entries=1000)


def tar(*members: tuple[str, dict[str, Any], bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, fields, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def link(target: str, kind: bytes = tarfile.SYMTYPE) -> dict[str, Any]:
    return {"type": kind, "linkname": target}


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        (tar(("../x", {}, b"")), "inside the tree"),
        (tar(("a/../../x", {}, b"")), "inside the tree"),
        (tar(("/etc/x", {}, b"")), "inside the tree"),
        (tar(("a//x", {}, b"")), "inside the tree"),
        (tar(("l", link("/etc"), b"")), "leads out"),
        (tar(("d/l", link("../../x"), b"")), "leads out"),
        (tar(("l", link("."), b""), ("m", link("l/../x"), b"")), "leads out"),
        (tar(("l", link("d"), b""), ("l/x", {}, b"")), "goes through 'l'"),
        (tar(("f", {}, b"x"), ("f/x", {}, b"")), "goes through 'f'"),
        (tar(("h", link("/etc/passwd", tarfile.LNKTYPE), b"")), "special"),
        (tar(("c", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}, b"")), "special"),
        (tar(("b", {"type": tarfile.BLKTYPE}, b"")), "special"),
        (tar(("p", {"type": tarfile.FIFOTYPE}, b"")), "special"),
        (tar(("x", {}, b"1"), ("x", {}, b"2")), "twice"),
        (tar(("d/x", {}, b"1"), ("d", {}, b"2")), "folder already"),
        (tar(*((f"f{n}", {}, b"") for n in range(1001))), "1000 entries"),
        (tar(("x", {}, bytes(21 << 20)), mode="w:gz"), "more than"),
        (tar(("x" * 5000, {}, b"")), "too long"),
        (tar(("/".join("d" * 200), {}, b"")), "too long or deep"),
        (b"not an archive at all", "cannot be read"),
        (tar(("x", {}, b"1"))[:600], "cannot be read"),
        (gzip.compress(bytes(1 << 20))[:-600], "cannot be read"),
    ],
)  # fmt: skip
def test_archives_that_are_refused(archive: bytes, why: str) -> None:
    with pytest.raises(UnsafeTreeError, match=why):
        list(read_archive(archive, LIMITS))


def test_a_declared_size_is_refused_before_it_is_read() -> None:
    info = tarfile.TarInfo("x")
    info.size = 10 << 30
    with pytest.raises(UnsafeTreeError, match="declares"):
        list(read_archive(info.tobuf() + bytes(10240), LIMITS))


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


SAYS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


@pytest.mark.parametrize("kind", SAYS)
def test_what_is_said_of_an_entry_is_short(kind: bytes) -> None:
    """Compressed, hundreds of megabytes of it are a small archive; it would be read whole."""
    for size in (2 << 20, 19 << 20, -512, -(1 << 40)):
        archive = header(kind, size) + bytes(max(size, 0)) + bytes(10240)
        with pytest.raises(UnsafeTreeError, match=r"says|cannot be read"):
            list(read_archive(archive, LIMITS))


@pytest.mark.parametrize(
    "kind", [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE]
)
def test_a_size_below_nothing_is_refused(kind: bytes) -> None:
    """Else the next entry is this one again, and again."""
    with pytest.raises(UnsafeTreeError):
        list(read_archive(tarfile.TarInfo("first").tobuf() + header(kind, -512) + bytes(10240), LIMITS))
    with pytest.raises(UnsafeTreeError):
        list(read_archive(tar(("x", {"pax_headers": {"size": "-512"}}, b"y" * 600)), LIMITS))


def test_headers_of_headers_end() -> None:
    with pytest.raises(UnsafeTreeError, match="cannot be read"):
        list(read_archive(header(tarfile.XGLTYPE, 0) * 5000 + bytes(10240), LIMITS))


def zipped(*members: tuple[str, bytes, int]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data, mode in members:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        (zipped(("../x", b"", 0o644)), "inside the tree"),
        (zipped(("/x", b"", 0o644)), "inside the tree"),
        (zipped(("l", b"/etc", 0o120777)), "leads out"),
        (zipped(("p", b"", 0o010644)), "special"),
        (zipped(("x", bytes(19 << 20), 0o644)), "unpacks to more"),  # allowed by size, not by ratio
        (zipped(*((str(n), bytes(4 << 20), 0o644) for n in range(6))), "unpacks to more"),
    ],
)
def test_zip_archives_that_are_refused(archive: bytes, why: str) -> None:
    with pytest.raises(UnsafeTreeError, match=why):
        list(read_archive(archive, LIMITS))


def test_a_zip_that_lies_about_its_sizes_is_refused() -> None:
    archive = bytearray(zipped(("x", bytes(9 << 20), 0o644)))
    size = struct.pack("<I", 9 << 20)
    while (at := archive.find(size)) >= 0:
        archive[at : at + 4] = struct.pack("<I", 100)
    with pytest.raises(UnsafeTreeError):
        list(read_archive(bytes(archive), LIMITS))


def test_what_is_harmless_passes_without_set_id_bits() -> None:
    members = (("./d", {"type": tarfile.DIRTYPE}, b""), ("d/x", {"mode": 0o6755, "mtime": 5}, b"data"))
    for mode in ("w", "w:gz", "w:bz2", "w:xz"):
        items = list(read_archive(tar(*members, ("d/l", link("x"), b""), mode=mode), LIMITS))
        assert [(entry.path, entry.kind) for entry, _ in items] == [
            ("d", "dir"),
            ("d/x", "file"),
            ("d/l", "link"),
        ]
        assert (items[1][0].mode, items[1][0].mtime, items[1][1]) == (0o755, 5 * 10**9, b"data")
    (entry, data), *_ = read_archive(zipped(("a/b", b"z", 0o100755)), LIMITS)
    assert (entry.path, entry.mode, data) == ("a/b", 0o755, b"z")


def test_a_bomb_is_refused_at_once() -> None:
    bomb = gzip.compress(bytes(200 << 20), 1)
    start = time.process_time()
    with pytest.raises(UnsafeTreeError, match="unpacks to more"):
        list(read_archive(bomb, LIMITS))
    assert time.process_time() - start < 2


def raw(*entries: dict[str, Any], data: bytes = b"") -> bytes:
    return (
        b"".join(struct.pack("!I", len(text)) + text for text in (json.dumps(e).encode() for e in entries))
        + data
    )


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\xff" * 10, ProtocolError),
        (raw({}), ProtocolError),
        (struct.pack("!I", 2) + b"[]", ProtocolError),
        (struct.pack("!I", 3) + b"}}}", ProtocolError),
        (raw({"path": "x", "kind": "file", "size": -1}), ProtocolError),
        (raw({"path": "x", "kind": "file", "size": 1 << 30}), ProtocolError),
        (raw({"path": "x", "kind": "file", "mode": "7"}), ProtocolError),
        (raw({"path": "x", "kind": "file", "extra": 1}), ProtocolError),
        (raw({"path": 3, "kind": "file"}), ProtocolError),
        (raw({"path": "x", "kind": None}), ProtocolError),
        (raw({"path": "x", "kind": "file", "size": 5}), ProtocolError),
        (raw({"path": "x", "kind": "pipe"}), UnsafeTreeError),
        (raw({"path": "x", "kind": "file", "at": 7}), UnsafeTreeError),
        (raw({"path": "x\0", "kind": "file"}), UnsafeTreeError),
        (raw({"path": "l", "kind": "link", "target": "/x"}), UnsafeTreeError),
        (raw({"path": "l", "kind": "link", "target": "a"}, {"path": "l/x", "kind": "file"}), UnsafeTreeError),
        (raw({"path": "f", "kind": "file"}, {"path": "f", "kind": "link", "target": "a"}), UnsafeTreeError),
        (raw({"path": ".", "kind": "link", "target": "a"}), UnsafeTreeError),
    ],
)
def test_a_sandbox_that_lies_about_its_tree_leaves_nothing(
    tmp_path: Path, data: bytes, kind: type[Exception]
) -> None:
    writer = TreeWriter(tmp_path / "to", LIMITS)
    with pytest.raises(kind):
        try:
            writer.feed(data)
            writer.finish()
        finally:
            writer.discard()
    assert os.listdir(tmp_path) == []


NAMES = st.sampled_from(["a", "b", "..", ".", "", "c\0", "é"])
ENTRIES = st.builds(
    Entry,
    path=st.lists(NAMES, min_size=1, max_size=4).map("/".join),
    kind=st.sampled_from(["file", "dir", "link", "pipe"]),
    mode=st.integers(0, 0o7777),
    target=st.lists(NAMES, max_size=4).map("/".join),
)


@settings(max_examples=300, deadline=None)
@given(entries=st.lists(ENTRIES, max_size=6))
def test_nothing_is_ever_made_outside(tmp_path_factory: pytest.TempPathFactory, entries: list[Entry]) -> None:
    base = tmp_path_factory.mktemp("base")
    writer = TreeWriter(base / "to", LIMITS)
    try:
        for entry in entries:
            writer.feed(encode(entry, b""))
        if entries:
            writer.finish()
    except (UnsafeTreeError, ProtocolError, FileExistsError, NotADirectoryError):
        pass
    finally:
        writer.discard()
    assert set(os.listdir(base)) <= {"to"}
    inside = os.path.realpath(base / "to")
    for path in (base / "to").rglob("*"):
        real = os.path.realpath(path)
        assert real == inside or real.startswith(inside + "/")


def split(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces: list[bytes] = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), max_size=20))
def test_pieces_of_any_size_are_parsed_alike(sizes: list[int]) -> None:
    items = [
        (Entry("d", "dir"), b""),
        (Entry("d/x", "file", size=50), bytes(range(50))),
        (Entry("e", "file"), b""),
    ]
    parser = Parser()
    found = [item for piece in split(b"".join(batches(items)), sizes) for item in parser.feed(piece)]
    parser.end()
    assert found == items


def test_a_local_tree_is_read_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(3 << 20))
    items = list(read_tree(tmp_path, LIMITS))
    assert [(entry.path, entry.at, entry.size) for entry, _ in items] == [
        (".", 0, 0), ("x", 0, 1 << 20), ("x", 1 << 20, 1 << 20), ("x", 2 << 20, 1 << 20),
    ]  # fmt: skip
    with pytest.raises(UnsafeTreeError, match="bytes"):
        list(read_tree(tmp_path, TreeLimits(2 << 20)))
    os.mkfifo(tmp_path / "p")
    with pytest.raises(UnsafeTreeError, match="special"):
        list(read_tree(tmp_path, LIMITS))


def test_a_file_is_continued_only_where_it_ends() -> None:
    checker = Checker(LIMITS)
    check: Callable[[Entry], Entry] = checker.check
    check(Entry("x", "file", size=10))
    check(Entry("x", "file", size=5, at=10))
    with pytest.raises(UnsafeTreeError, match="twice"):
        check(Entry("x", "file", size=5, at=14))
