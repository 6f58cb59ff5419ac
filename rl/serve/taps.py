"""Tokens as they are sampled, from the engine's thread to whoever listens in the event loop.

Who only wants whole turns does not listen, and pays nothing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl.engines.base import StepFrame, StepListener

Tokens = asyncio.Queue[list[int]]


class Taps:
    """A step listener that also delivers to listeners of single sessions; `then` hears every step first."""

    def __init__(self, then: StepListener | None = None) -> None:
        self._then = then
        self._queues: dict[str, Tokens] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def on_step(self, frame: StepFrame) -> None:
        """Takes the tokens of one decode step; called in the engine's thread."""
        if self._then is not None:
            self._then(frame)
        loop, queues = self._loop, self._queues
        if not queues or loop is None:
            return
        found: defaultdict[str, list[int]] = defaultdict(list)
        for session, token in zip(frame.sessions, frame.token_ids.tolist(), strict=True):
            if session in queues:
                found[session].append(token)
        if found:
            with suppress(RuntimeError):  # the loop is closed, and with it everyone who listened
                loop.call_soon_threadsafe(self._deliver, dict(found))

    @contextmanager
    def listen(self, session: str) -> Iterator[Tokens]:
        """Returns a queue of the tokens that this session gets from now on."""
        self._loop = asyncio.get_running_loop()
        queue: Tokens = asyncio.Queue()
        self._queues = self._queues | {session: queue}
        try:
            yield queue
        finally:
            self._queues = {name: held for name, held in self._queues.items() if held is not queue}

    def _deliver(self, found: dict[str, list[int]]) -> None:
        for session, tokens in found.items():
            if (queue := self._queues.get(session)) is not None:
                queue.put_nowait(tokens)
