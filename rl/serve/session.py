"""One caller: requests become turns of the conversations that they continue, and turns become answers."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from envs.types import FinishReason
from model.chat import ChatError, ChatFormat, ParsedTurn, Prompt
from model.engine.sampler import SamplingParams
from model.images import ImageError, ImageReader
from rl.engines.base import Completion, EngineError
from rl.serve.conversations import Conversations, Node, join
from rl.serve.errors import ApiError, of_engine, overflow
from rl.serve.messages import Message, in_order
from rl.serve.reader import TurnReader
from rl.serve.requests import ChatRequest
from rl.serve.voices import Spoken, Turn, Voice

ShowChoice = Callable[[int, dict[str, Any]], None]
"""Takes the number of a choice and a delta of its message."""
_THREAD_FROM = 20_000
"""Characters of messages from which rendering leaves the event loop."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: the message as the caller gets it, why it ended, and the tokens it was read from."""

    message: Message
    finish: str
    completion: Completion


@dataclass(frozen=True, slots=True)
class Answer:
    """All answers to a request, which had `prompt_tokens`."""

    choices: tuple[Choice, ...]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """The sampled tokens."""
        return sum(len(choice.completion.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class _Start:
    """Where the turns of a request begin: after `parent`, with `prompt` new."""

    parent: Node | None
    prompt: Prompt
    history: Prompt


@dataclass(frozen=True, slots=True)
class _Asked:
    request: ChatRequest
    effort: int | None
    start: _Start


class Session:
    """The conversations of one key.

    Args:
        voice: Samples the turns.
        chat: The checkpoint's chat format.
        reader: Reads images; None: the policy takes none.
        effort: When the caller names none; None: the format's own.
        fixed_effort: Whether a caller may not choose another.
        most_tokens: How much is remembered; 0: everything.
    """

    def __init__(
        self,
        voice: Voice,
        chat: ChatFormat,
        reader: ImageReader | None = None,
        *,
        effort: int | None = None,
        fixed_effort: bool = False,
        most_tokens: int = 0,
    ) -> None:
        self._voice, self._chat, self._reader = voice, chat, reader
        self._effort, self._fixed_effort = effort, fixed_effort
        self.conversations = Conversations(most_tokens)
        self._turn = asyncio.Lock()
        self._number = 0
        self._answering: set[asyncio.Task[Any]] = set()

    async def answer(self, request: ChatRequest, show: ShowChoice | None = None) -> Answer:
        """Samples the answers to a request; a cancelled call ends their turns.

        Raises:
            ApiError: The request cannot be served.
        """
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            return await self._answer(request, show)
        finally:
            self._answering.discard(task)

    async def close(self) -> None:
        """Ends what is being answered, and waits for it."""
        tasks = list(self._answering)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: ChatRequest, show: ShowChoice | None) -> Answer:
        effort = self._effort if request.effort is None or self._fixed_effort else request.effort
        async with self._turn if self._voice.alone else nullcontext():
            start = await self._begin(request, effort)
            size = len(start.history.token_ids)
            if size >= self._voice.context:
                raise overflow(size, self._voice.context)
            asked = _Asked(request, effort, start)
            work = [self._choice(asked, i, show) for i in range(request.n)]
            choices = await _one_by_one(work) if self._voice.alone else await _together(work)
        return Answer(tuple(choices), size)

    async def _begin(self, request: ChatRequest, effort: int | None) -> _Start:
        """Finds what the request continues and renders what is new."""
        found = self.conversations.find(request.messages, request.tools, effort)
        if found is not None and self._chat.rewrites_history(request.tools):
            found = None
        has_images = any(not isinstance(message["content"], str) for message in request.messages)
        if has_images and not self._voice.images:
            raise ApiError(
                "this model takes no images here: send text", param="messages", code="unsupported_value"
            )

        def render() -> _Start:
            if found is None:
                prompt = self._chat.prompt(
                    request.messages, tools=request.tools, effort=effort, images=self._reader
                )
                return _Start(None, prompt, prompt)
            rest = in_order(found.rest, found.node.calls)
            prompt = self._chat.observation(rest, images=self._reader)
            return _Start(found.node, prompt, join(found.node.history(), prompt))

        try:
            long = has_images or sum(len(m["content"]) for m in request.messages) > _THREAD_FROM
            return await asyncio.to_thread(render) if long else render()
        except (ChatError, ImageError) as error:
            raise ApiError(str(error), param="messages", code="invalid_value") from error

    async def _choice(self, asked: _Asked, index: int, show: ShowChoice | None) -> Choice:
        request, start = asked.request, asked.start
        shown = None if show is None else lambda delta: show(index, delta)
        reader = TurnReader(self._chat, request.tools, request.stops, shown)
        room = self._voice.context - len(start.history.token_ids)
        parent = start.parent
        goes_on = parent is not None and not parent.continued
        turn = Turn(
            start.history,
            len(start.prompt.token_ids),
            parent.branch if parent is not None and goes_on else "",
            SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                max_tokens=min(request.max_tokens or room, room),
                stop_ids=frozenset(self._chat.stop_ids),
                seed=_seed(request.seed, index),
            ),
            request.tools,
        )
        if parent is not None:
            parent.continued = True
        try:
            spoken = await self._speak(turn, reader)
        except BaseException:
            if parent is not None and goes_on:
                parent.continued = False
            raise
        choice = self._heard(asked, reader, spoken)
        if shown is not None and (calls := choice.message.get("tool_calls")):
            shown({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        return choice

    async def _speak(self, turn: Turn, reader: TurnReader) -> Spoken:
        try:
            spoken = await self._voice.speak(turn, reader.feed if reader.wants_tokens else None)
        except EngineError as error:
            raise of_engine(error) from error
        if spoken.completion.finish is FinishReason.ABORT:
            raise ApiError("the engine ends: the turn was broken off", status=503, kind="server_error")
        return spoken

    def _heard(self, asked: _Asked, reader: TurnReader, spoken: Spoken) -> Choice:
        """Reads a sampled turn, remembers it, and returns the answer."""
        parsed = reader.finish(spoken.completion.token_ids)
        whole = spoken.completion.finish is FinishReason.STOP and not reader.stopped
        number, self._number = self._number, self._number + 1
        message = _message(reader, parsed if whole else None, number)
        calls = tuple(call["id"] for call in message.get("tool_calls", ()))
        parent = asked.start.parent
        node = Node(
            parent,
            asked.start.prompt,
            spoken.completion,
            message,
            spoken.branch,
            whole,
            calls,
            (*(parent.reasonings if parent is not None else ()), message.get("reasoning_content", "")),
            number,
        )
        seen = (message, {**message, "content": reader.content})  # whole, and as streamed
        request = asked.request
        self.conversations.add(node, request.messages, seen, request.tools, asked.effort)
        finish = "tool_calls" if calls else "stop" if whole or reader.stopped else "length"
        return Choice(message, finish, spoken.completion)


def _message(reader: TurnReader, parsed: ParsedTurn | None, number: int) -> Message:
    """A turn as its caller gets it; without `parsed` it was cut, and there is what could be read."""
    message: Message = {"role": "assistant", "content": reader.content}
    if reader.reasoning:
        message["reasoning_content"] = reader.reasoning
    if parsed is None:
        return message
    message |= {name: value for name, value in parsed.message.items() if name != "tool_calls"}
    if calls := parsed.message.get("tool_calls"):
        message["tool_calls"] = [{**call, "id": f"call_{number}_{i}"} for i, call in enumerate(calls)]
    if parsed.parse_error:
        message["parse_error"] = parsed.parse_error
    return message


async def _one_by_one(work: Sequence[Any]) -> list[Choice]:
    done: list[Choice] = []
    try:
        for one in work:
            done.append(await one)
    finally:
        for one in work[len(done) :]:
            one.close()
    return done


async def _together(work: Sequence[Any]) -> list[Choice]:
    """Runs all; when one fails or the caller leaves, the others end too."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _seed(seed: int | None, index: int) -> int:
    """63 bits for one choice; without a seed they are drawn."""
    if seed is None:
        return secrets.randbits(63)
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
