"""Deadlines of a sandbox that is paused now and then."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox.clocks import Clocks


async def test_a_deadline_without_a_pause() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Clocks().within(0.1):
            await asyncio.sleep(5)
    assert 0.09 < time.monotonic() - start < 2


async def test_a_pause_does_not_count() -> None:
    clocks = Clocks()

    async def wait(seconds: float) -> float:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            async with clocks.within(seconds):
                await asyncio.sleep(5)
        return time.monotonic() - start

    waits = [asyncio.create_task(wait(seconds)) for seconds in (0.2, 0.3)]
    await asyncio.sleep(0.1)
    clocks.hold()
    assert clocks.held
    await asyncio.sleep(0.4)
    assert not any(task.done() for task in waits)
    clocks.go_on()
    first, second = await asyncio.gather(*waits)
    assert 0.59 < first < second < 3 and not clocks.held


async def test_a_deadline_set_during_a_pause_begins_after_it() -> None:
    clocks = Clocks()
    clocks.hold()

    async def wait() -> None:
        async with clocks.within(0.2):
            await asyncio.sleep(5)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.3)
    assert not task.done()
    clocks.go_on()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 3)


async def test_what_ends_in_time_is_forgotten() -> None:
    clocks = Clocks()
    async with clocks.within(0.1):
        pass
    clocks.hold()
    clocks.go_on()
    await asyncio.sleep(0.15)
