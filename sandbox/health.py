"""Signs of life: a sandbox whose agent was stopped or lost is ended also when nobody asks anything of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from sandbox.box import Box
from sandbox.errors import SandboxError

EVERY_S = 10.0
"""How often each sandbox is asked for a sign of life."""

SILENT_S = 40.0
"""How long one may take to give it; a machine with hundreds of sandboxes can be slow for all of them."""


async def tend(living: Mapping[str, Box]) -> None:
    """Asks all sandboxes in turns, spread over time; the channel itself ends one that does not answer."""
    asked: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            asked = {name: task for name, task in asked.items() if not task.done()}
            due = [box for name, box in living.items() if name not in asked and not box.resident.clocks.held]
            for box in due:
                asked[box.id] = asyncio.create_task(_ask(box))
                await asyncio.sleep(EVERY_S / len(due))
            if not due:
                await asyncio.sleep(EVERY_S)
    finally:
        for task in asked.values():
            task.cancel()


async def _ask(box: Box) -> None:
    with contextlib.suppress(SandboxError):
        await box.ping(SILENT_S)
