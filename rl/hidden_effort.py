"""A control for effort: the same conversation without the line that tells the effort.

A policy that cannot read the effort cannot follow it. If lengths still differ by effort, something other than
the prompt gives it away.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.chat import ChatFormat, ParsedTurn, Prompt, StreamParser
from model.chat.base import Message, Tool
from model.images import ImageReader


class HiddenEffort(ChatFormat):
    """Renders and reads as `chat` does, but never tells the effort. Saved, it is the format it hides."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.tokenizer, self.stop_ids = chat.tokenizer, chat.stop_ids

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The kind of the format that is hidden."""
        return self._chat.kind

    def render_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), effort: int | None = None
    ) -> list[int]:
        """Renders a conversation without its effort."""
        return self._chat.render_prompt(messages, tools=tools)

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        effort: int | None = None,
        images: ImageReader | None = None,
    ) -> Prompt:
        """Renders a conversation with its images, without its effort."""
        return self._chat.prompt(messages, tools=tools, images=images)

    def observation(self, messages: Sequence[Message], *, images: ImageReader | None = None) -> Prompt:
        """Renders an observation with its images."""
        return self._chat.observation(messages, images=images)

    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """Renders an observation."""
        return self._chat.render_observation(messages)

    def rewrites_history(self, tools: Sequence[Tool]) -> bool:
        """Whether earlier turns are rendered otherwise than they were sampled."""
        return self._chat.rewrites_history(tools)

    def rewrites(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        effort: int | None = None,
    ) -> bool:
        """Whether turns are to be rendered anew."""
        return self._chat.rewrites(before, new, tools=tools)

    def save(self, folder: Path) -> None:
        """Writes the format that is hidden."""
        self._chat.save(folder)

    def render_assistant(self, message: Message, *, tools: Sequence[Tool] = ()) -> list[int]:
        """Renders a demonstration's turn."""
        return self._chat.render_assistant(message, tools=tools)  # pyright: ignore[reportCallIssue]

    def parse(self, ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Reads a sampled turn."""
        return self._chat.parse(ids, tools=tools)

    def stream(self, *, tools: Sequence[Tool] = ()) -> StreamParser:
        """Returns a parser to be fed a turn while it is sampled."""
        return self._chat.stream(tools=tools)

    def to_dict(self) -> dict[str, Any]:
        """Returns the wording."""
        return self._chat.to_dict()
