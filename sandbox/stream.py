"""The output of a command while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

from sandbox.types import ExecResult, Output

Run = Callable[[Callable[[Output], None]], Awaitable[ExecResult]]


class Stream:
    """An async iterator of a command's output, within `async with`; leaving it early kills the command.

    The first `output_limit` bytes of each stream come as they are written; `result` has head and tail.
    """

    def __init__(self, run: Run):
        self._run = run
        self._pieces: asyncio.Queue[Output | None] = asyncio.Queue()
        self._task: asyncio.Task[ExecResult] | None = None

    @property
    def result(self) -> ExecResult:
        """What the command returned, once the iteration has ended."""
        if self._task is None or not self._task.done():
            raise RuntimeError("the command still runs: iterate to the end first")
        return self._task.result()

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._run(self._pieces.put_nowait))
        self._task.add_done_callback(lambda _: self._pieces.put_nowait(None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        if not self._task.done():
            self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()

    async def __aiter__(self) -> AsyncIterator[Output]:
        if self._task is None:
            raise RuntimeError("a stream is used within `async with`")
        while (piece := await self._pieces.get()) is not None:
            yield piece
        self._task.result()
