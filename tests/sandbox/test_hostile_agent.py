"""The host believes nothing that an agent says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sandbox.channel import Header, encode, read_frame
from sandbox.errors import LostError, ProtocolError
from sandbox.frames import FrameProtocol
from sandbox.resident import Resident, check_result

GOOD: Header = {
    "exit_code": 0, "signal": None, "stdout_bytes": 0, "stderr_bytes": 0, "disk_full": False,
    "truncated": False, "timed_out": False, "cancelled": False,
    "dirty": False, "duration_s": 0.1,
}  # fmt: skip


class Liar:
    """The other end of a channel, on real sockets; `answer` makes the bytes that follow a request."""

    def __init__(self, answer: Callable[[Header], bytes], late_s: float = 5.0):
        self._answer, self._late_s, self.killed = answer, late_s, 0
        self._served = asyncio.Event()

    async def __aenter__(self) -> Resident:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        address = self._server.sockets[0].getsockname()
        loop = asyncio.get_running_loop()
        _, self._channel = await loop.create_connection(FrameProtocol, *address)
        self.resident = Resident(self._channel, self._kill, late_s=self._late_s)
        return self.resident

    async def __aexit__(self, *_: object) -> None:
        await self.resident.close()
        await self._channel.wait_closed()
        await self._served.wait()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(LostError, ConnectionError):
            while True:
                header, _ = await read_frame(reader)
                writer.write(self._answer(header))
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self._served.set()

    async def _kill(self) -> None:
        self.killed += 1
        self._channel.close()


def reply(changes: Mapping[str, Any], body: bytes = b"") -> Callable[[Header], bytes]:
    return lambda header: encode({"id": header["id"], "seq": 1, **GOOD, **changes}, body)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (reply({"id": 77}), "nothing that was asked"),
        (reply({"id": True}), "nothing that was asked"),
        (reply({"seq": 2}), "out of sequence"),
        (lambda h: 2 * reply({})(h), "nothing that was asked"),
        (reply({}, bytes(10_000)), "announces"),
        (lambda h: b"\xff" * 100, "announces"),
        (lambda h: b"\0\0\0\2\0\0\0\0[]", "not a JSON object"),
    ],
)
async def test_a_lie_ends_the_sandbox(answer: Callable[[Header], bytes], why: str) -> None:
    async with (liar := Liar(answer)) as resident:
        with pytest.raises(ProtocolError, match=why):
            for _ in range(3):
                await resident.request({"op": "exec", "limit": 100}, timeout_s=5)
                await asyncio.sleep(0.05)
        with pytest.raises(ProtocolError, match=why):
            await resident.request({"op": "ping"}, timeout_s=5)
    assert liar.killed == 1


async def test_silence_ends_the_sandbox() -> None:
    async with (liar := Liar(lambda header: b"", late_s=0.1)) as resident:
        with pytest.raises(LostError, match="did not answer within 0 s"):
            await resident.request({"op": "exec", "limit": 100}, timeout_s=0.1)
        assert liar.killed == 1


async def test_all_that_wait_hear_of_the_end() -> None:
    async with Liar(lambda header: b"" if header["op"] == "exec" else b"\xff" * 100) as resident:
        calls = [resident.request({"op": "exec", "limit": 9}, timeout_s=9) for _ in range(5)]
        waiting = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.05)
        with pytest.raises(ProtocolError):
            await resident.request({"op": "ping"}, timeout_s=9)
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == 5 * [ProtocolError]


@pytest.mark.parametrize(
    ("changes", "body"),
    [
        ({"exit_code": True}, b""),
        ({"exit_code": "0"}, b""),
        ({"exit_code": 256}, b""),
        ({"exit_code": -9}, b""),
        ({"exit_code": 10**3000}, b""),
        ({"signal": 65}, b""),
        ({"duration_s": float("inf")}, b""),
        ({"duration_s": float("nan")}, b""),
        ({"duration_s": -1}, b""),
        ({"stdout_bytes": 3}, b"xx"),
        ({"stdout_bytes": 1, "stderr_bytes": 2}, b"xx"),
        ({"stderr_bytes": -1}, b"xx"),
        ({"stdout_bytes": 1}, b"xx"),
        ({"stdout_bytes": -1}, b"xx"),
        ({"truncated": 1}, b""),
        ({"duration_s": None}, b""),
        ({"stdout_bytes": 1000}, bytes(1000)),
    ],
)
def test_results_out_of_shape(changes: Mapping[str, Any], body: bytes) -> None:
    with pytest.raises(ProtocolError):
        check_result({**GOOD, **changes}, body, 100)
    check_result(GOOD, b"", 100)
