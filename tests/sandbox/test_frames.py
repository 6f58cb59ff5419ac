"""Frames that come over a socket, in any pieces, to whoever listens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from sandbox.channel import Header, encode
from sandbox.errors import LostError, ProtocolError, SandboxError
from sandbox.frames import FrameProtocol


class End:
    """One end of a pair of sockets, what came there, and why no more comes."""

    def __init__(self, frames: FrameProtocol, peer: socket.socket):
        self.frames, self.peer = frames, peer
        self.got: list[tuple[Header, bytes]] = []
        self.faults: list[SandboxError] = []

    def listen(self, most: int = 100) -> None:
        self.frames.listen(
            lambda header, body: self.got.append((header, body)), self.faults.append, lambda: most
        )

    async def until(self, count: int, faults: int = 0) -> None:
        async with asyncio.timeout(20):
            while len(self.got) < count or len(self.faults) < faults:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
async def end() -> AsyncIterator[End]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    _, frames = await asyncio.get_running_loop().create_connection(FrameProtocol, sock=ours)
    with theirs:
        yield End(frames, theirs)
    frames.close()
    await frames.wait_closed()


FRAMES: list[tuple[Header, bytes]] = [
    ({"id": 1}, b""),
    ({"id": 2, "é": [1.5]}, bytes(range(100))),
    ({}, b"x"),
]
BYTES = b"".join(encode(*frame) for frame in FRAMES)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 50, 1000])
async def test_frames_come_in_any_pieces(end: End, size: int) -> None:
    end.listen()
    for a, b in pairwise([*range(0, len(BYTES), size), len(BYTES)]):
        end.peer.sendall(BYTES[a:b])
        await asyncio.sleep(0)
    await end.until(3)
    assert (end.got, end.faults) == (FRAMES, [])


async def test_what_came_before_the_end_is_handed_on_first(end: End) -> None:
    end.peer.sendall(BYTES)
    end.peer.close()
    end.listen()
    await end.until(3, 1)
    assert end.got == FRAMES and isinstance(end.faults[0], LostError)


async def test_who_holds_gets_no_more_until_going_on(end: End) -> None:
    def take(header: Header, body: bytes) -> None:
        end.got.append((header, body))
        end.frames.hold()

    end.frames.listen(take, end.faults.append)
    end.peer.sendall(BYTES)
    end.peer.close()
    for count in (1, 2, 3):
        await end.until(count)
        await asyncio.sleep(0.02)
        assert (len(end.got), end.faults) == (count, [])
        end.frames.go_on()
    await end.until(3, 1)
    assert end.got == FRAMES and isinstance(end.faults[0], LostError)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff" * 8, id="too large"),
        pytest.param(encode({}, bytes(101)), id="more than is allowed"),
        pytest.param(b"\0\0\0\2\0\0\0\0[]", id="no object"),
        pytest.param(b"\0\0\0\2\0\0\0\0{{", id="no JSON"),
    ],
)
async def test_what_is_no_frame_ends_the_channel(end: End, data: bytes) -> None:
    end.listen()
    end.peer.sendall(encode({"id": 1}) + data + encode({"id": 2}))
    await end.until(1, 1)
    assert end.got == [({"id": 1}, b"")] and isinstance(end.faults[0], ProtocolError)
    assert await asyncio.to_thread(end.peer.recv, 1) == b""


async def test_a_fault_of_the_listener_ends_the_channel_once(end: End) -> None:
    def take(header: Header, body: bytes) -> None:
        raise ProtocolError("not asked for")

    end.frames.listen(take, end.faults.append)
    end.peer.sendall(BYTES)
    await end.until(0, 1)
    await end.frames.wait_closed()
    assert [str(fault) for fault in end.faults] == ["not asked for"]


async def test_a_full_channel_drains_when_it_is_read(end: End) -> None:
    end.listen()
    size, read = 1 << 22, 0
    end.frames.write(bytes(size))
    draining = asyncio.create_task(end.frames.drain())
    await asyncio.sleep(0.02)
    assert not draining.done()
    while read < size:
        read += len(await asyncio.to_thread(end.peer.recv, 1 << 20))
    async with asyncio.timeout(20):
        await draining
