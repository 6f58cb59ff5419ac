"""A sandbox on its node, where another one's turn comes between."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.box import Box


async def test_a_command_waits_for_a_snapshot_that_begins_as_another_ends() -> None:
    done: list[str] = []

    async def perform(command: dict[str, Any], body: bytes, sink: Any) -> str:
        done.append(command["op"])
        return "outcome"

    box: Any = SimpleNamespace(
        calm=asyncio.Event(), recorder=None, perform=perform, _check=lambda command: None
    )
    waiting = asyncio.create_task(Box.run(box, {"op": "exec"}, b""))
    await asyncio.sleep(0)
    box.calm.set()
    box.calm.clear()  # the next one, before the command had its turn
    for _ in range(5):
        await asyncio.sleep(0)
    assert done == []
    box.calm.set()
    assert await waiting == "outcome" and done == ["exec"]


async def test_a_pause_whose_caller_goes_away_does_not_lengthen_the_life() -> None:
    pausing, clocks = asyncio.Event(), SimpleNamespace(held=False)
    clocks.hold = lambda: setattr(clocks, "held", True)
    clocks.go_on = lambda: setattr(clocks, "held", False)

    async def pause(stop: bool) -> None:
        if stop:
            pausing.set()
            await asyncio.get_running_loop().create_future()

    async def request(header: dict[str, Any], timeout_s: float) -> None:
        pass

    box: Any = SimpleNamespace(
        pausing=asyncio.Lock(), started=SimpleNamespace(pause=pause), held_at=0.0, used=0.0,
        resident=SimpleNamespace(clocks=clocks, request=request), end=time.monotonic() + 60,
    )  # fmt: skip
    box._go_on = lambda: Box._go_on(box)
    leaving = asyncio.create_task(Box.pause(box))
    await pausing.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert clocks.held
    await Box.resume(box)
    assert not clocks.held and box.end - time.monotonic() < 120
