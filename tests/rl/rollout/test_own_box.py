"""A sample's own sandbox, where somebody goes away while it is being opened."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rl.rollout.sandboxes import FleetBox
from sandbox.errors import LostError
from sandbox.types import SandboxSpec


async def test_an_interrupted_opening_that_fails_is_an_interruption_and_no_fault() -> None:
    begun, lost = asyncio.Event(), asyncio.Event()

    async def create(spec: SandboxSpec, key: str) -> Any:
        begun.set()
        await lost.wait()
        raise LostError("the node went with everything else")

    async def get() -> Any:
        return SimpleNamespace(create=create)

    sandboxes: Any = SimpleNamespace(fleet=SimpleNamespace(get=get))
    opening = asyncio.create_task(FleetBox(sandboxes, "", SandboxSpec(), None).open())
    await begun.wait()
    opening.cancel()
    await asyncio.sleep(0)
    lost.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
