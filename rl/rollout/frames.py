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

import numpy as np

FORMAT = 1
MAGIC = b"TEMPRLOG"
_SYNC = b"\xf5\x0d\xa7\x3c"
_SYNC_WORD = int.from_bytes(_SYNC, "little")
_HEADER = struct.Struct("<8sHHIII")
_RECORD = struct.Struct("<IIIB3x")
_CHECKED = struct.Struct("<IB3x")
_INT = struct.Struct("<i")
_CRC_FROM = 8

ROW = np.dtype([("slot", "<u4"), ("turn", "<u4"), ("index", "<u4"), ("token", "<i4"), ("logprob", "<f4")])
"""One token: the slot of its sample, its turn, its place in the turn, its id and its log-probability."""


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


class SegmentError(ValueError):
    """A file that is no segment of the token log, or one of a format this version cannot read."""


Record = tuple[int, int, int]
"""A whole record: its kind, and start and end of its payload in the segment."""


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


def scan(data: bytes, damage: Damage) -> tuple[list[Record], int]:
    """Returns the whole records after the header and the end of the last one; adds to `damage`."""
    records: list[Record] = []
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
            records.append((kind, position + head, end))
            position = good = end
            continue
        position = data.find(_SYNC, position + 1)
        if position < 0:
            break
    damage.torn_bytes += size - good
    return records, good


def step_payload(version: int, rows: np.ndarray) -> bytes:
    """Returns the payload of a STEP: the policy version and `rows` (ROW [n])."""
    return _INT.pack(version) + rows.tobytes()


def step_rows(data: bytes, start: int, end: int) -> tuple[int, np.ndarray]:
    """Returns version and rows (a view) of a STEP."""
    (version,) = _INT.unpack_from(data, start)
    return version, np.frombuffer(data, ROW, (end - start - 4) // ROW.itemsize, start + 4)


def step_columns(data: bytes, records: list[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of all STEPs among the records, in order, and the version of each row (int32)."""
    step = int(Kind.STEP)  # comparing with the enum's member takes ten times as long
    ranges = [(start, end) for kind, start, end in records if kind == step]
    if not ranges:
        return np.zeros(0, ROW), np.zeros(0, np.int32)
    view = memoryview(data)
    rows = np.frombuffer(b"".join([view[start + 4 : end] for start, end in ranges]), ROW)
    starts, ends = np.array(ranges).T
    heads = np.frombuffer(data, np.uint8)[starts[:, None] + np.arange(4)]
    versions = np.ascontiguousarray(heads).view("<i4")[:, 0].astype(np.int32)
    return rows, np.repeat(versions, (ends - starts - 4) // ROW.itemsize)


def ints(kind: str, *values: int) -> bytes:
    """Packs unsigned 32-bit integers (kind "I" each) in front of a payload."""
    return struct.pack(f"<{kind}", *values)


def slots_of(data: bytes, item: Record) -> Iterator[int]:
    """The slots that a record is about (of a STEP: none)."""
    kind, start, end = item
    if kind == Kind.CONSUMED:
        yield from np.frombuffer(data, "<u4", (end - start) // 4, start).tolist()
    elif kind != Kind.STEP:
        yield struct.unpack_from("<I", data, start)[0]
