from __future__ import annotations

import asyncio
import json
import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.channel import MAX_BODY, MAX_HEADER, encode, read_frame
from sandbox.errors import LostError, ProtocolError, SandboxError

HEADERS = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=20), max_size=5)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


async def feed(reader: asyncio.StreamReader, chunks: list[bytes]) -> None:
    for chunk in chunks:
        reader.feed_data(chunk)
        await asyncio.sleep(0)
    reader.feed_eof()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(HEADERS, st.binary(max_size=50)), max_size=5),
    st.lists(st.integers(0, 1000), max_size=9),
)
def test_frames_survive_split_reads(frames: list[tuple[dict[str, object], bytes]], cuts: list[int]) -> None:
    async def check() -> None:
        reader = asyncio.StreamReader()
        data = b"".join(encode(header, body) for header, body in frames)
        feeding = asyncio.create_task(feed(reader, pieces(data, cuts)))
        assert [await read_frame(reader) for _ in frames] == frames
        with pytest.raises(LostError):
            await read_frame(reader)
        await feeding

    asyncio.run(check())


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_noise_is_a_typed_error(data: bytes) -> None:
    async def check() -> None:
        reader = asyncio.StreamReader()
        await feed(reader, [data])
        try:
            while True:
                assert isinstance((await read_frame(reader))[0], dict)
        except SandboxError:
            pass

    asyncio.run(check())


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!II", MAX_HEADER + 1, 0),
        struct.pack("!II", 2, MAX_BODY + 1) + b"{}",
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 1, 0) + b"{",
        struct.pack("!II", 2, 0) + b"\xff\xfe",
        struct.pack("!II", 60000, 0) + b"[" * 60000,
    ],
)
async def test_a_frame_out_of_shape(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    with pytest.raises(ProtocolError):
        await read_frame(reader)


@pytest.mark.parametrize("data", [b"", b"\0\0", struct.pack("!II", 5, 5) + b"{}"])
async def test_a_stream_that_ends(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    with pytest.raises(LostError):
        await read_frame(reader)


def test_what_is_too_large_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="split the data"):
        encode({"x": "y" * MAX_HEADER})
    assert json.loads(encode({"a": 1})[8:]) == {"a": 1}
