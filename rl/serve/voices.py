"""Where turns of a conversation are sampled: by an engine on its own, or as those of a sample in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from envs.types import FinishReason
from model.chat import Prompt
from model.engine.sampler import SamplingParams
from rl.engines.base import Completion, Engine, GenerateRequest, HistoryImages
from rl.serve.taps import Taps

Hear = Callable[[Sequence[int]], bool]
"""Takes tokens as they come, and says whether the turn is to end here."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn to sample.

    Attributes:
        history: Everything before it.
        new: How many tokens of the history are new since the turn that it continues.
        branch: The run of turns that it continues; empty: it begins one.
        sampling: As the caller asks; a voice may have its own.
        tools: What the policy was shown.
    """

    history: Prompt
    new: int
    branch: str
    sampling: SamplingParams
    tools: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Spoken:
    """A sampled turn and the run of turns that it ends."""

    completion: Completion
    branch: str


class Voice(Protocol):
    """Samples turns. `context` bounds a sequence; `alone`: one turn at a time; `images`: takes them."""

    context: int
    alone: bool
    images: bool

    async def speak(self, turn: Turn, hear: Hear | None) -> Spoken:
        """Samples a turn; a cancelled call ends it. What `hear` cuts ends with `LENGTH`."""
        ...


class EngineVoice:
    """Turns of callers who need nothing but tokens; caches stay with the runs of turns that use them.

    Args:
        engine: Whose step listener is `taps.on_step`.
        taps: Delivers tokens.
        name: Begins the names of its sessions.
        context: The engine's `max_tokens`.
        images: Whether the policy takes them.
    """

    alone = False

    def __init__(self, engine: Engine, taps: Taps, name: str, context: int, *, images: bool) -> None:
        self._engine, self._taps, self._name = engine, taps, name
        self.context, self.images = context, images
        self._made = 0
        self._busy: set[str] = set()

    async def speak(self, turn: Turn, hear: Hear | None) -> Spoken:
        """Samples a turn."""
        session = turn.branch
        if not session or session in self._busy:
            session, self._made = f"{self._name}/{self._made}", self._made + 1
        self._busy.add(session)
        pictures = turn.history.images
        request = GenerateRequest(
            session,
            1 if session == turn.branch else 0,
            turn.history.token_ids,
            turn.sampling,
            images=HistoryImages(turn.history.types, pictures) if pictures else None,
        )
        try:
            completion = await listening(
                self._taps, self._engine, session, hear, self._engine.generate(request)
            )
        finally:
            self._busy.discard(session)
        return Spoken(completion, session)


async def listening(taps: Taps, engine: Engine, session: str, hear: Hear | None, sampling: Any) -> Completion:
    """Awaits a turn that a session samples, with `hear` getting its tokens; it may cut the turn."""
    if hear is None:
        return await sampling
    cut = False

    async def pass_on() -> None:
        nonlocal cut
        while True:
            if hear(await queue.get()):
                cut = True
                await engine.abort(session)
                return

    with taps.listen(session) as queue:
        beside = asyncio.create_task(pass_on())
        try:
            completion = await sampling
        finally:
            beside.cancel()
            with suppress(asyncio.CancelledError):
                await beside
    if cut and completion.finish is FinishReason.ABORT:
        return replace(completion, finish=FinishReason.LENGTH)
    return completion
