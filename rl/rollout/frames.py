"""The bytes of the token log: segment headers, checksummed records, and a scan that survives damage.

A segment is a header and records. A record is a sync word, a CRC32, a length, a kind and the payload; the
CRC covers everything after itself. A scan that meets damage looks for the next sync word whose record
checks out, so that one flipped bit costs one record. Everything is little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

FORMAT = 1
MAGIC = b"TEMPRLOG"
_SYNC = b"\xf5\x0d\xa7\x3c"
_SYNC_WORD = int.from_bytes(_SYNC, "little")
_HEADER = struct.Struct("<8sHHIII")
_RECORD = struct.Struct("<IIIB3x")
_CHECKED = struct.Struct("<IB3x")
_INT = struct.Struct("<i")
_CRC = struct.Struct("<I")
_CRC_FROM = 8

ROW = np.dtype([("slot", "<u4"), ("turn", "<u4"), ("index", "<u4"), ("token", "<i4"), ("logprob", "<f4")])
"""One token: the slot of its sample, its turn, its place in the turn, its id and its log-probability."""

ITEM = np.dtype((np.void, ROW.itemsize))
"""A row as an opaque item, which numpy copies several times faster than a record."""


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


def header(number: int, covers_from: int) -> bytes:
    """Returns a segment's header; the segment replaces those numbered `covers_from` up to its own number."""
    head = _HEADER.pack(MAGIC, FORMAT, 0, number, covers_from, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


HEADER_BYTES = _HEADER.size


def read_header(data: bytes, name: str) -> tuple[int, int]:
    """Returns number and `covers_from` of a segment.

    Raises:
        SegmentError: The header is damaged or of another format.
    """
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        raise SegmentError(f"{name} is no segment of a token log (its first bytes are {bytes(data[:8])!r})")
    _, version, _, number, covers_from, crc = _HEADER.unpack_from(data)
    if crc != zlib.crc32(data[: HEADER_BYTES - 4]):
        raise SegmentError(f"the header of {name} is damaged")
    if version != FORMAT:
        raise SegmentError(f"{name} has format {version}; this version reads {FORMAT}")
    return number, covers_from


def record(kind: Kind, payload: bytes) -> bytes:
    """Returns a record with its checksum."""
    checked = _CHECKED.pack(len(payload), kind)
    return _SYNC + struct.pack("<I", zlib.crc32(payload, zlib.crc32(checked))) + checked + payload


def scan(data: bytes, damage: Damage) -> Scan:
    """Returns the whole records after the header; adds to `damage`."""
    found = Scan()
    starts, ends, others, step = found.starts, found.ends, found.others, int(Kind.STEP)
    view = memoryview(data)
    position, size, good = HEADER_BYTES, len(data), HEADER_BYTES
    unpack, crc32, head = _RECORD.unpack_from, zlib.crc32, _RECORD.size
    while position + head <= size:
        sync, crc, length, kind = unpack(view, position)
        end = position + head + length
        if sync == _SYNC_WORD and end <= size and crc32(view[position + _CRC_FROM : end]) == crc:
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


@dataclass(slots=True)
class StepWriter:
    """A STEP record of a fixed number of rows that is filled in place and copied out once a step."""

    rows: np.ndarray
    buffer: bytearray

    @classmethod
    def of(cls, count: int) -> StepWriter:
        """Returns a writer for `count` rows, all zero."""
        buffer = bytearray(_RECORD.size + 4 + count * ROW.itemsize)
        _RECORD.pack_into(buffer, 0, _SYNC_WORD, 0, len(buffer) - _RECORD.size, Kind.STEP)
        return cls(np.frombuffer(buffer, ROW, count, _RECORD.size + 4), buffer)

    def record(self, version: int) -> bytes:
        """Returns the record with the rows as they are now."""
        _INT.pack_into(self.buffer, _RECORD.size, version)
        _CRC.pack_into(self.buffer, len(_SYNC), zlib.crc32(memoryview(self.buffer)[_CRC_FROM:]))
        return bytes(self.buffer)


def step_rows(data: bytes, start: int, end: int) -> tuple[int, np.ndarray]:
    """Returns version and rows (a view) of a STEP."""
    (version,) = _INT.unpack_from(data, start)
    return version, np.frombuffer(data, ROW, (end - start - 4) // ROW.itemsize, start + 4)


def step_columns(data: bytes, found: Scan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns all rows of a segment in order (as opaque items), their versions, and each STEP's row count."""
    view, starts = memoryview(data), np.array(found.starts, np.int64)
    parts = [view[start + 4 : end] for start, end in zip(found.starts, found.ends, strict=True)]
    rows = np.frombuffer(b"".join(parts), ITEM)
    heads = np.frombuffer(data, np.uint8)[starts[:, None] + np.arange(4)]
    versions = np.ascontiguousarray(heads).view("<i4").reshape(-1).astype(np.int32)
    counts = (np.array(found.ends, np.int64) - starts - 4) // ROW.itemsize
    return rows, np.repeat(versions, counts), counts


def ints(kind: str, *values: int) -> bytes:
    """Packs unsigned 32-bit integers (kind "I" each) in front of a payload."""
    return struct.pack(f"<{kind}", *values)


def slots_of(data: bytes, item: Record) -> Iterator[int]:
    """The slots that a record is about."""
    if item.kind == Kind.CONSUMED:
        yield from np.frombuffer(data, "<u4", (item.end - item.start) // 4, item.start).tolist()
    else:
        yield struct.unpack_from("<I", data, item.start)[0]
