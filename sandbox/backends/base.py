"""What a backend is: it starts one sandbox with the resident agent in it, and can end it for certain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandbox.channel import ByteReader
from sandbox.resident import ByteWriter
from sandbox.types import SandboxSpec

AGENT = Path(__file__).parent.parent / "agent" / "agent.py"
COMMAND_UID = 60000


@dataclass(frozen=True, slots=True)
class Started:
    """A sandbox that runs: its agent's streams, how to end it, and whether the kernel killed for memory."""

    reader: ByteReader
    writer: ByteWriter
    kill: Callable[[], Awaitable[None]]
    oom_kills: Callable[[], Awaitable[int]]


class Backend(Protocol):
    """One way to isolate. `missing` says in one line why it cannot be used here, or is empty."""

    name: str

    async def missing(self) -> str:
        """Returns what this machine lacks, with the way to get it; empty when all is there."""
        ...

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one sandbox."""
        ...

    async def reclaim(self, keep: frozenset[str]) -> list[str]:
        """Removes sandboxes of owners not in `keep` that an earlier node left behind; returns their ids."""
        ...
