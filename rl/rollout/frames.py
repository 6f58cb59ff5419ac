"""The bytes of the token log: segment headers, checksummed records, and a scan that survives damage.

A segment is a header and records. A record is a sync word, a checksum, a length, a kind and the payload; the
checksum covers everything after itself. A scan that meets damage looks for the next sync word whose record
checks out, so that one flipped bit costs one record. Everything is little-endian. The header says the
format: 3 is written; 2 is read too (ends of samples have their tokens), and 1 (CRC32, decode steps as rows).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from mmap import mmap
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

FORMAT = 3
READABLE = (1, 2, 3)
MAGIC = b"TEMPRLOG"
_SYNC = b"\xf5\x0d\xa7\x3c"
_SYNC_WORD = int.from_bytes(_SYNC, "little")
_HEADER = struct.Struct("<8sHHIII")
_RECORD = struct.Struct("<IIIB3x")
_CHECK = struct.Struct("<II")
_BODY = struct.Struct("<IB3x")
"""A record's head in two parts: what the checksum does not cover, and what it does."""
_CHECKED_FROM = _CHECK.size
_LOW = 0xFFFFFFFF

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes, of whatever shape."""
Data = bytes | mmap
"""A whole segment in memory, or mapped."""


class Kind(IntEnum):
    """What a record says. A slot stands for one attempt at one sample and is never used again."""

    START = 1
    BEGIN = 2
    STEP = 3
    TURN = 4
    RESULT = 5
    RESET = 6
    END = 7
    CONSUMED = 8
    PLACE = 9
    STARTS = 10
    IMAGES = 11


class SegmentError(ValueError):
    """A file that is no segment of the token log, or one of a format this version cannot read."""


class Record(NamedTuple):
    """A whole record that is no STEP: how many STEPs are before it, its kind, and where its payload lies."""

    steps_before: int
    kind: int
    start: int
    end: int


@dataclass(slots=True)
class Scan:
    """The whole records of a segment: payloads of STEPs from `starts` to `ends`, the others, and the end."""

    format: int = FORMAT
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    others: list[Record] = field(default_factory=list)
    end: int = 0


@dataclass(slots=True)
class Damage:
    """What a scan could not use: bytes inside a segment, bytes of a torn tail, places, segments' headers."""

    damaged_bytes: int = 0
    torn_bytes: int = 0
    places: int = 0
    unreadable_segments: list[str] = field(default_factory=list)


class Header(NamedTuple):
    """What a segment's header says; the segment replaces those from `covers_from` up to its own number."""

    format: int
    number: int
    covers_from: int


def header(number: int, covers_from: int) -> bytes:
    """Returns the header of a new segment."""
    head = _HEADER.pack(MAGIC, FORMAT, 0, number, covers_from, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


HEADER_BYTES = _HEADER.size


def read_header(data: bytes, name: str) -> Header:
    """Returns what a segment's header says.

    Raises:
        SegmentError: The header is damaged or of another format.
    """
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        raise SegmentError(f"{name} is no segment of a token log (its first bytes are {bytes(data[:8])!r})")
    _, version, _, number, covers_from, crc = _HEADER.unpack_from(data)
    if crc != zlib.crc32(data[: HEADER_BYTES - 4]):
        raise SegmentError(f"the header of {name} is damaged")
    if version not in READABLE:
        known = f"{', '.join(map(str, READABLE[:-1]))} and {READABLE[-1]}"
        raise SegmentError(f"{name} has format {version}; this version reads {known}")
    return Header(version, number, covers_from)


class Sealed(NamedTuple):
    """A whole record of `size` bytes; its buffers must not change until they are written."""

    buffers: list[Buffer]
    size: int


def sealed(kind: Kind, front: Sequence[Buffer], rest: Sequence[Buffer], size: int) -> Sealed:
    """Returns a record of these bytes, `size` together, of which only `front` is copied."""
    body = b"".join([_BODY.pack(size, kind), *front])
    digest = xxh3_64(body)
    for part in rest:
        digest.update(part)
    check = _CHECK.pack(_SYNC_WORD, digest.intdigest() & _LOW)
    return Sealed([check, body, *rest], _RECORD.size + size)


def record(kind: Kind, *parts: bytes) -> bytes:
    """Returns a whole record of these bytes."""
    body = b"".join([_BODY.pack(sum(map(len, parts)), kind), *parts])
    return _CHECK.pack(_SYNC_WORD, xxh3_64_intdigest(body) & _LOW) + body


def _xxh3(data: memoryview) -> int:
    return xxh3_64_intdigest(data) & _LOW


_CHECKSUMS: dict[int, Callable[[memoryview], int]] = {1: zlib.crc32, 2: _xxh3, 3: _xxh3}


def scan(data: Data, form: int, damage: Damage) -> Scan:
    """Returns the whole records after the header of a segment of format `form`; adds to `damage`."""
    found = Scan(form)
    starts, ends, others, step = found.starts, found.ends, found.others, int(Kind.STEP)
    position, size, good = HEADER_BYTES, len(data), HEADER_BYTES
    unpack, checksum, head = _RECORD.unpack_from, _CHECKSUMS[form], _RECORD.size
    with memoryview(data) as view:
        while position + head <= size:
            sync, expected, length, kind = unpack(view, position)
            end = position + head + length
            if (
                sync == _SYNC_WORD
                and end <= size
                and checksum(view[position + _CHECKED_FROM : end]) == expected
            ):
                if position != good:
                    damage.damaged_bytes += position - good
                    damage.places += 1
                if kind == step:
                    starts.append(position + head)
                    ends.append(end)
                else:
                    others.append(Record(len(starts), kind, position + head, end))
                position = good = end
                continue
            position = data.find(_SYNC, position + 1)
            if position < 0:
                break
    damage.torn_bytes += size - good
    found.end = good
    return found


def ints(kind: str, *values: int) -> bytes:
    """Packs unsigned 32-bit integers (kind "I" each) in front of a payload."""
    return struct.pack(f"<{kind}", *values)


def slots_of(data: Data, item: Record) -> Iterator[int]:
    """The slots that a record is about."""
    if item.kind == Kind.CONSUMED:
        yield from np.frombuffer(data, "<u4", (item.end - item.start) // 4, item.start).tolist()
    else:
        yield struct.unpack_from("<I", data, item.start)[0]
