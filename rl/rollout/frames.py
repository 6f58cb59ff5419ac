"""The bytes of the token log: segment headers, checksummed records, and a scan that survives damage.

A segment is a header and records. A record is a sync word, a checksum, a length, a kind and the payload; the
checksum covers everything after itself. A scan that meets damage looks for the next sync word whose record
checks out, so that one flipped bit costs one record. Everything is little-endian. The header says the
format: 2 is written (XXH3, decode steps as columns), 1 is read too (CRC32, decode steps as rows).
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

FORMAT = 2
READABLE = (1, 2)
MAGIC = b"TEMPRLOG"
_SYNC = b"\xf5\x0d\xa7\x3c"
_SYNC_WORD = int.from_bytes(_SYNC, "little")
_HEADER = struct.Struct("<8sHHIII")
_RECORD = struct.Struct("<IIIB3x")
_CHECKED_FROM = 8
_LOW = 0xFFFFFFFF

Buffer = bytes | bytearray | memoryview
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
        known = " and ".join(map(str, READABLE))
        raise SegmentError(f"{name} has format {version}; this version reads {known}")
    return Header(version, number, covers_from)


class Unsealed(NamedTuple):
    """A record without its checksum, which whoever writes it out adds; `parts` must not change until then."""

    head: bytearray
    parts: Sequence[Buffer]

    @property
    def size(self) -> int:
        """Bytes of the whole record."""
        return len(self.head) + sum(len(part) for part in self.parts)

    def seal(self) -> list[Buffer]:
        """Returns the buffers of the record, checksum included."""
        digest = xxh3_64(memoryview(self.head)[_CHECKED_FROM:])
        for part in self.parts:
            digest.update(part)
        struct.pack_into("<I", self.head, 4, digest.intdigest() & _LOW)
        return [self.head, *self.parts]


def record(kind: Kind, *parts: Buffer) -> Unsealed:
    """Returns a record of these bytes."""
    head = bytearray(_RECORD.size)
    _RECORD.pack_into(head, 0, _SYNC_WORD, 0, sum(len(part) for part in parts), kind)
    return Unsealed(head, parts)


def _xxh3(data: memoryview) -> int:
    return xxh3_64_intdigest(data) & _LOW


_CHECKSUMS: dict[int, Callable[[memoryview], int]] = {1: zlib.crc32, 2: _xxh3}


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
