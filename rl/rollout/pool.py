"""Many samples at once in one event loop: started in batches, collected in batches, stopped together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rl.rollout.faults import Interrupted

R = TypeVar("R")


class RolloutLoop(Generic[R]):
    """Runs one task for each sample and hands results out in the order in which they come.

    An exception of a task is not a sample's fault (those are data): the next `collect` raises it.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[R]] = set()
        self._done: list[R] = []
        self._failures: list[BaseException] = []
        self._something = asyncio.Event()
        self.interrupted = 0

    @property
    def running(self) -> int:
        """Samples that have not ended."""
        return len(self._tasks)

    def run(self, name: str, make: Callable[[], Awaitable[R]]) -> None:
        """Starts a sample."""

        async def call() -> R:
            return await make()

        task = asyncio.get_running_loop().create_task(call(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def collect(self, max_wait_s: float) -> list[R]:
        """Returns everything that is ready; waits at most `max_wait_s` for the first.

        Raises:
            BaseException: What a task died of.
        """
        if not self._something.is_set():
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._something.wait()
            except TimeoutError:
                return []
        self._something.clear()
        if self._failures:
            raise self._failures.pop(0)
        done, self._done = self._done, []
        return done

    async def cancel(self, deadline_s: float) -> int:
        """Cancels all samples and waits for their clean-up; returns how many missed the deadline."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if not tasks:
            return 0
        _, late = await asyncio.wait(tasks, timeout=deadline_s)
        return len(late)

    def _ended(self, task: asyncio.Task[R]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self.interrupted += 1
            return
        error = task.exception()
        if isinstance(error, Interrupted):
            self.interrupted += 1
            return
        if error is not None:
            self._failures.append(error)
        else:
            self._done.append(task.result())
        self._something.set()
