"""The bytes of journals and of the lease file: records with checksums, torn tails told from damage.

    file    = MAGIC  version:u16  record*
    record  = head:u32  body:u32  crc32:u32  JSON object of `head` bytes  `body` bytes

The checksum covers lengths, object and body. A last record that is cut short or whose checksum is wrong is
what a crash leaves (*torn*). A wrong record with others behind it is damage, and an error.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from sandbox.errors import JournalError

MAGIC = b"TMPRJRNL"
VERSION = 2
"""Written by this program; it reads the one before as well."""

_VERSION = struct.Struct("!H")
RECORD = struct.Struct("!III")
START = len(MAGIC) + _VERSION.size
_BEGIN = b'{"kind": '
"""How the object of every record begins."""

Record = dict[str, Any]


class Scanned(NamedTuple):
    """A record: where it starts, its object and body, and where the next one starts."""

    offset: int
    record: Record
    body: bytes
    end: int


def _from_1(record: Record, body: bytes) -> Record:
    """Version 2 has the snapshot, an intent's operation, a result's signal, full disk and further bytes."""
    if record["kind"] == "sandbox":
        return {**record, "snapshot": ""}
    if record["kind"] == "intent":
        size = record["command_bytes"]
        return {**record, "op": json.loads(body[:size])["op"] if size >= 0 else ""}
    if record["kind"] != "result":
        return record
    code = record["exit_code"]
    signal = code - 128 if code is not None and 128 < code <= 128 + 64 else None
    kept = record["output_bytes"] if record["output_bytes"] >= 0 else record["stdout_bytes"]
    return {**record, "signal": signal, "disk_full": False, "stderr_bytes": kept - record["stdout_bytes"]}


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of file.

    Attributes:
        noun: What messages call it.
        magic: Its first eight bytes.
        version: Written by this program; it reads the one before as well.
        upgrades: By version, how a record of it becomes one of the next.
    """

    noun: str
    magic: bytes
    version: int
    upgrades: Mapping[int, Callable[[Record, bytes], Record]]


JOURNAL = Form("journal", MAGIC, VERSION, {1: _from_1})


def opening(version: int = VERSION, form: Form = JOURNAL) -> bytes:
    """Returns what a file starts with."""
    return form.magic + _VERSION.pack(version)


def encode(record: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Returns a record as bytes."""
    head = json.dumps(record).encode()
    sizes = RECORD.pack(len(head), len(body), 0)[:8]
    checksum = zlib.crc32(body, zlib.crc32(head, zlib.crc32(sizes)))
    return sizes + checksum.to_bytes(4, "big") + head + body


def decode(data: bytes | memoryview) -> tuple[Record, bytes] | None:
    """Returns the record that `data` starts with, or None when it is cut short or wrong."""
    if len(data) < RECORD.size:
        return None
    head, size, checksum = RECORD.unpack_from(data)
    content = data[RECORD.size : RECORD.size + head + size]
    if not head or len(content) < head + size or zlib.crc32(content, zlib.crc32(data[:8])) != checksum:
        return None
    try:
        record: object = json.loads(bytes(content[:head]))
    except (ValueError, RecursionError):
        return None
    return (cast("Record", record), bytes(content[head:])) if isinstance(record, dict) else None


def version_of(data: bytes, path: Path, form: Form = JOURNAL) -> int:
    """Returns the version of a file that starts with `data`.

    Raises:
        JournalError: It is none, or of a version that is not read here.
    """
    if len(data) < START or not data.startswith(form.magic):
        raise JournalError(f"{path} is not a {form.noun}")
    (version,) = _VERSION.unpack_from(data, len(form.magic))
    oldest = max(form.version - 1, 1)
    if not oldest <= version <= form.version:
        raise JournalError(
            f"the {form.noun} {path} has format {version}, and {oldest} to {form.version} are read here: "
            "use the release that wrote it, or start the sandbox anew"
        )
    return version


def scan(path: Path, form: Form = JOURNAL) -> Iterator[Scanned]:
    """Yields the records of a file, those of an older version as of this one, up to a torn tail.

    Raises:
        JournalError: It is damaged in the middle, or of a version that is not read here.
    """
    data = path.read_bytes()
    version, view, offset = version_of(data, path, form), memoryview(data), START
    while offset < len(data):
        found = decode(view[offset:])
        if found is None:
            if not _torn(view[offset:]):
                raise JournalError(
                    f"the {form.noun} {path} is damaged at byte {offset}, with records behind it"
                )
            return
        record, body = found
        for older in range(version, form.version):
            record = form.upgrades[older](record, body)
        head, size, _ = RECORD.unpack_from(view, offset)
        end = offset + RECORD.size + head + size
        yield Scanned(offset, record, body, end)
        offset = end


def begun(path: Path) -> bool:
    """Whether the first record of a file is there in full."""
    with path.open("rb") as file:
        start = file.read(START + RECORD.size)
        if len(start) < START + RECORD.size:
            return False
        head, size, _ = RECORD.unpack_from(start, START)
        return bool(head) and os.fstat(file.fileno()).st_size >= START + RECORD.size + head + size


def _torn(rest: memoryview) -> bool:
    """Whether a record that cannot be read is the file's last: cut short, half on disk, or never written.

    Zeros may stand behind it, as far as the file had grown. A whole record behind it says that it is not the
    last, whatever length it claims.
    """
    data = bytes(rest)
    if len(data) < RECORD.size or not data.strip(b"\0"):
        return True
    head, size, _ = RECORD.unpack_from(data)
    if not head or data[RECORD.size + head + size :].strip(b"\0"):
        return False
    place = data.find(_BEGIN, RECORD.size + 1)
    while place >= 0:
        if decode(rest[place - RECORD.size :]) is not None:
            return False
        place = data.find(_BEGIN, place + 1)
    return True


def upgrade(path: Path) -> None:
    """Rewrites a journal of the version before as one of this version."""
    with path.open("rb") as file:
        if version_of(file.read(START), path) == VERSION:
            return
    fresh = path.with_suffix(".upgrade")
    with fresh.open("wb") as file:
        file.write(opening())
        for _, record, body, _ in scan(path):
            file.write(encode(record, body))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
