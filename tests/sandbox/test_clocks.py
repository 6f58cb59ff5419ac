"""Deadlines of a sandbox that is paused now and then."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox.clocks import Clocks


async def within(clocks: Clocks, seconds: float) -> float:
    """Waits for what does not come; returns how long that took."""
    start = time.monotonic()
    reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    clocks.start(reply, seconds)
    with pytest.raises(TimeoutError):
        await reply
    clocks.stop(reply)
    return time.monotonic() - start


async def test_a_deadline_without_a_pause() -> None:
    assert 0.09 < await within(Clocks(), 0.1) < 5


async def test_a_pause_does_not_count() -> None:
    clocks = Clocks()
    waits = [asyncio.create_task(within(clocks, seconds)) for seconds in (0.2, 0.3)]
    await asyncio.sleep(0.1)
    clocks.hold()
    assert clocks.held
    await asyncio.sleep(0.4)
    assert not any(task.done() for task in waits)
    clocks.go_on()
    first, second = await asyncio.gather(*waits)
    assert 0.59 < first < second < 5 and not clocks.held


async def test_a_deadline_set_during_a_pause_begins_after_it() -> None:
    clocks = Clocks()
    clocks.hold()
    task = asyncio.create_task(within(clocks, 0.2))
    await asyncio.sleep(0.3)
    assert not task.done()
    clocks.go_on()
    assert await asyncio.wait_for(task, 5) > 0.49


async def test_what_ends_in_time_is_forgotten() -> None:
    clocks = Clocks()
    reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    clocks.start(reply, 0.1)
    reply.set_result("in time")
    clocks.stop(reply)
    clocks.hold()
    clocks.go_on()
    await asyncio.sleep(0.15)
    assert await reply == "in time"


async def test_a_reply_just_before_its_deadline_stays() -> None:
    clocks = Clocks()
    reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    clocks.start(reply, 0.01)
    reply.set_result("in time")
    await asyncio.sleep(0.05)
    assert await reply == "in time"
