"""Engines of one role that work for all generators: watched, replaced when they die, made known to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rl.actors import Process
from rl.replicas import OpenReplica, Replica, Replicas
from rl.restarts import Restarts

_WATCH_S = 2.0


class Helpers(Replicas):
    """Prefill engines, then encode engines; a request that one died of is asked again of its successor.

    Args:
        processes: The helpers, just started: `prefill` ones that compute prompts come first.
        prefill: How many compute prompts.
        generators: Who is helped.
        reopen, restarts, note: As `Replicas` takes them.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        prefill: int,
        generators: Replicas,
        reopen: OpenReplica,
        restarts: Restarts,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(processes, reopen, restarts, note)
        self._prefill, self._generators = prefill, generators
        self._watching: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Makes the helpers known to all generators, and watches them from now on."""
        await self._generators.each(self.introduce)
        self._watching = asyncio.create_task(self._watch())

    async def introduce(self, generator: Replica) -> None:
        """Makes the helpers known to a generator."""
        remotes = [helper.process.remote for helper in self.replicas]
        await generator.process.call("engine.use", remotes[: self._prefill], remotes[self._prefill :])

    def check(self) -> None:
        """Raises what the watch died of: a helper that died too often."""
        if self._watching is not None and self._watching.done():
            self._watching.result()

    async def stop(self) -> None:
        """Ends the watch; the processes stay their owner's to stop."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await self._all("ping")
            await asyncio.sleep(_WATCH_S)

    async def _take_over(self, replica: Replica) -> None:
        """A helper has no samples of its own; the generators ask its successor again."""
        await self._generators.each(self.introduce)
        self._note(f"the new {replica.process.role} is at work")
