"""A file is read as exactly the entry it was written as, or not at all."""

import hashlib

import pytest

from model.cache.page_file import HEADER_BYTES, CorruptFile, Entry, ForeignFile, Kind, pack, unpack

KEY, OTHER = hashlib.sha256(b"a").digest(), hashlib.sha256(b"b").digest()


def file(kind=Kind.PAGE, key=KEY, payload=b"payload" * 9, start=12):
    return b"".join(pack(kind, key, Entry(payload, start)))


def test_an_entry_comes_back():
    assert unpack(file(), Kind.PAGE, KEY) == Entry(b"payload" * 9, 12)
    assert unpack(file(payload=b""), Kind.PAGE, KEY).payload == b""


def test_the_layout_is_the_documented_one():
    data = file(payload=b"xyz")
    assert (data[:8], data[8:12], data[12:16]) == (b"TMPRPREF", b"\1\0\0\0", b"\1\0\0\0")
    assert data[16:48] == KEY and data[48:56] == (12).to_bytes(8, "little")
    assert data[56:64] == (3).to_bytes(8, "little") and data[80:] == b"xyz" and HEADER_BYTES == 80
    assert data[64:80] == hashlib.blake2b(data[:64] + b"xyz", digest_size=16).digest()


def test_every_changed_byte_and_every_cut_is_found():
    data = file()
    for i in range(len(data)):
        with pytest.raises((CorruptFile, ForeignFile)):
            unpack(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :], Kind.PAGE, KEY)
        with pytest.raises(CorruptFile):
            unpack(data[:i], Kind.PAGE, KEY)
    with pytest.raises(CorruptFile):
        unpack(data + b"\0", Kind.PAGE, KEY)


@pytest.mark.parametrize("data", [file(key=OTHER), file(kind=Kind.TAIL), b"PK\3\4" + bytes(200)])
def test_another_entry_under_this_name_is_foreign(data):
    with pytest.raises(ForeignFile):
        unpack(data, Kind.PAGE, KEY)
