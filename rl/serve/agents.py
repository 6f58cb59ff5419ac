"""Agent programs in a run: each sample has a key, and what is asked with it becomes the sample's turns.

Sampling is the run's, whatever a program asks for: temperature, truncation, seeds and effort belong to what
is learned. Requests of one sample are served one after another, for its log knows one open turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from envs.agents import SANDBOX_URL, Access, AgentError, inside
from model.chat import ChatFormat
from model.images import ImageReader
from rl.engines.base import Completion, Engine
from rl.rollout.episode import EpisodeRun
from rl.rollout.pictures import last_images
from rl.serve.endpoint import Endpoint, on_loopback, on_socket
from rl.serve.session import Session
from rl.serve.taps import Taps
from rl.serve.voices import Hear, Spoken, Turn, listening
from sandbox.base import Sandbox

MODEL = "policy"
"""The model's name towards programs."""


class EpisodeVoice:
    """Turns of a sample. Only its newest branch goes on; a turn after an older one begins a new branch.

    The new branch's prompt is then the older one's ids, so each sampled token is trained once.
    """

    alone = True

    def __init__(
        self, episode: EpisodeRun, engine: Engine, taps: Taps, context: int, *, images: bool = False
    ) -> None:
        self._episode, self._engine, self._taps = episode, engine, taps
        self.context, self.images = context, images
        self._branch = ""
        self._made = 0

    async def speak(self, turn: Turn, hear: Hear | None) -> Spoken:
        """Samples a turn."""
        new_branch = not turn.branch or turn.branch != self._branch
        ids = turn.history.token_ids
        prompt_ids = tuple(ids if new_branch else ids[len(ids) - turn.new :])

        async def through(sampling: Awaitable[Completion]) -> Completion:
            return await listening(self._taps, self._engine, self._episode.session, hear, sampling)

        completion = await self._episode.speak(
            prompt_ids,
            new_branch=new_branch,
            tools=turn.tools,
            max_tokens=turn.sampling.max_tokens,
            through=through,
            images=last_images(turn.history.types, turn.history.images, len(prompt_ids)),
        )
        if new_branch:
            self._branch, self._made = f"b{self._made}", self._made + 1
        return Spoken(completion, self._branch)


@dataclass(slots=True)
class AgentDoor:
    """Implements `rl.rollout.episode.Door`: one endpoint for all samples of a process, opened when needed.

    Attributes:
        engine: Whose step listener is `taps.on_step`.
        taps: Delivers tokens.
        chat: The checkpoint's chat format.
        context: The longest conversation, in tokens.
        stack: Ends the endpoint.
        reader: Reads images; None: the policy takes none.
    """

    engine: Engine
    taps: Taps
    chat: ChatFormat
    context: int
    stack: AsyncExitStack
    reader: ImageReader | None = None
    _served: asyncio.Task[tuple[Endpoint, str]] | None = None

    @asynccontextmanager
    async def open(self, episode: EpisodeRun) -> AsyncIterator[Access]:
        """Hands out a key for one sample; what is asked with it ends with the sample."""
        if self._served is None:
            self._served = asyncio.create_task(self._serve())
        endpoint, url = await asyncio.shield(self._served)
        images = self.reader is not None
        voice = EpisodeVoice(episode, self.engine, self.taps, self.context, images=images)
        session = Session(voice, self.chat, self.reader, effort=episode.effort, fixed_effort=True)
        try:
            if inside(episode.agent):
                async with _in_sandbox(endpoint, session, episode.box) as access:
                    yield access
            else:
                with endpoint.key(session) as key:
                    yield Access(url, key, MODEL)
            if not episode.history.turns:
                raise AgentError(
                    "the agent ended without asking the model: its client must use OPENAI_BASE_URL, "
                    "OPENAI_API_KEY and OPENAI_MODEL"
                )
        finally:
            await session.close()

    async def _serve(self) -> tuple[Endpoint, str]:
        endpoint = Endpoint(MODEL, self.chat, self.engine.stats)
        return endpoint, await self.stack.enter_async_context(on_loopback(endpoint))


@asynccontextmanager
async def _in_sandbox(endpoint: Endpoint, session: Session, box: Sandbox | None) -> AsyncIterator[Access]:
    """Serves one sandbox on a socket of its own, where the key of its sample is the only one that counts."""
    if box is None:
        raise AgentError("this agent runs in a sandbox, and its sample has none")
    with box.hear() as ear, endpoint.key(session, f"sk-temper-{ear.secret}") as key:
        async with on_socket(endpoint.for_one(session), ear.sock):
            yield Access(SANDBOX_URL, key, MODEL)
