"""The file format of the prefix store: one entry a file, read only whole and only as what it was saved as.

An entry outlives the process that wrote it and is read by others, so a file proves three things before its
content reaches a cache: that it is one of ours (magic, version), that it is the entry asked for (kind, key),
and that nothing of it is missing or changed (length, checksum). All numbers are little-endian.

    offset  bytes  content
         0      8  magic "TMPRPREF"
         8      4  version of this format, 1
        12      4  kind: 1 compressed keys of a page, 2 tail of a session
        16     32  key: BLAKE2b-256 of the token ids and everything else the content depends on
        48      8  start of the replay in force for the encoder when the content was computed
        56      8  bytes of the payload
        64     16  checksum: BLAKE2b-128 of bytes 0 .. 63 and the payload
        80      -  payload

The payload of a page is, for each KV source layer in ascending order, the page of its main keys and then that
of its index keys: all codes, then all scales (`model.cache.records`). The payload of a tail is a safetensors
file.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

VERSION = 1
MAGIC = b"TMPRPREF"
KEY_BYTES = 32
HEADER_BYTES = 80
_CHECKSUM_BYTES = 16
_FIELDS = struct.Struct("<8sII32sqQ")


class Kind(IntEnum):
    """What an entry holds."""

    PAGE = 1
    TAIL = 2


class ForeignFile(ValueError):
    """A file that is not the entry it is named after: another format, version, kind or key."""


class CorruptFile(ValueError):
    """An entry that is cut short or changed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of a file."""

    payload: bytes
    replay_start: int
    """First position of the encoder replay in force for this content; 0: computed from the beginning."""


def pack(kind: Kind, key: bytes, entry: Entry) -> list[bytes]:
    """The file of `entry`, in pieces."""
    fields = _FIELDS.pack(MAGIC, VERSION, kind, key, entry.replay_start, len(entry.payload))
    return [fields, _checksum(fields, entry.payload), entry.payload]


def unpack(data: bytes, kind: Kind, key: bytes) -> Entry:
    """The entry in a file's `data`.

    Raises:
        ForeignFile: it is something else than the entry `key`.
        CorruptFile: it is cut short, or its checksum is wrong.
    """
    if len(data) < HEADER_BYTES:
        raise CorruptFile(f"{len(data)} bytes are too few for a header of {HEADER_BYTES}: drop the file")
    fields = data[: _FIELDS.size]
    magic, version, found_kind, found_key, replay_start, size = _FIELDS.unpack(fields)
    if magic != MAGIC or version != VERSION:
        raise ForeignFile(f"magic {magic!r} and version {version} are not {MAGIC!r} and {VERSION}: drop it")
    payload = data[HEADER_BYTES:]
    if len(payload) != size:
        raise CorruptFile(f"{len(payload)} bytes of payload instead of {size}: drop the file")
    if data[_FIELDS.size : HEADER_BYTES] != _checksum(fields, payload):
        raise CorruptFile("the checksum does not fit the content: drop the file")
    if found_kind != kind or found_key != key:
        raise ForeignFile(f"it holds kind {found_kind} of {found_key.hex()}, not {key.hex()}: drop it")
    return Entry(payload, replay_start)


def _checksum(fields: bytes, payload: bytes) -> bytes:
    checksum = hashlib.blake2b(fields, digest_size=_CHECKSUM_BYTES)
    checksum.update(payload)
    return checksum.digest()
