"""The chat format of the small presets: a handful of one-token tags and nothing else.

A conversation of a tool-using task reads, one token a character or tag::

    <effort>50 47*86= <call>47*86</call> <obs>4042</obs> <answer>4042<end>

A turn is free text (its reasoning) followed by calls or by an answer. Results of tools stand in observation
tags; other messages are bare, for a turn's own end delimits them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from model.chat.base import (
    ChatError,
    ChatFormat,
    Message,
    ParsedTurn,
    Tool,
    check_effort,
    parts_of,
    text_of,
)
from model.chat.nano_calls import Unreadable, call_body, read_call
from model.chat.nano_stream import NanoStream
from model.chat.prompt import Prompt
from model.images import ImageReader, PreparedImage
from model.tokenizer import Tokenizer, nano_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoWording:
    """The tags, each one token. `effort_end` may be "": then the prompt follows the effort's digits."""

    effort: str = "<effort>"
    effort_end: str = ""
    call: str = "<call>"
    call_end: str = "</call>"
    observation: str = "<obs>"
    observation_end: str = "</obs>"
    answer: str = "<answer>"
    end: str = "<end>"


class NanoChat(ChatFormat):
    """Renders and parses with one-token tags. See the module docstring for the grammar."""

    kind = "nano"

    def __init__(self, tokenizer: Tokenizer, wording: NanoWording) -> None:
        self.tokenizer = tokenizer
        self.wording = wording
        self._tags = {name: tokenizer.tag_id(tag) for name, tag in asdict(wording).items() if tag}
        self._names = {index: name for name, index in self._tags.items()}
        self._reserved = frozenset(tokenizer.tags.values())
        self.stop_ids = frozenset((self._tags["end"], self._tags["call_end"]))

    def to_dict(self) -> dict[str, Any]:
        """Returns the wording as JSON values."""
        return {"wording": asdict(self.wording)}

    def render_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), effort: int | None = None
    ) -> list[int]:
        """Renders `<effort>digits` and the messages. The tools are not spelt out: the policy knows them."""
        return self.prompt(messages, tools=tools, effort=effort).token_ids

    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """Renders tool results in observation tags, and other messages bare."""
        return self.observation(messages).token_ids

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        effort: int | None = None,
        images: ImageReader | None = None,
    ) -> Prompt:
        """As `render_prompt`, with the images that users' messages and tool results hold.

        Raises:
            ChatError: A message or the effort cannot be rendered, or there are images and no reader.
            ImageError: An image cannot be used.
        """
        ids: list[int] = []
        if effort is not None:
            ids += [self._tags["effort"], *self.tokenizer.encode(str(check_effort(effort)))]
            ids += [self._tags["effort_end"]] if "effort_end" in self._tags else []
        return Prompt.of_pieces([ids, *self._render(messages, tools, images)], images)

    def observation(self, messages: Sequence[Message], *, images: ImageReader | None = None) -> Prompt:
        """As `render_observation`, with images."""
        if any(message.get("role") == "assistant" for message in messages):
            raise ChatError("an observation is what others say; render an assistant's turn as such")
        return Prompt.of_pieces(self._render(messages, (), images), images)

    def render_assistant(self, message: Message, *, tools: Sequence[Tool] = ()) -> list[int]:
        """Renders a demonstration's turn: calls when it has any, else an answer.

        Without `tools`, a call with one string argument is taken for a call of the only tool.
        """
        ids = self.tokenizer.encode(str(message.get("reasoning_content") or ""))
        calls = message.get("tool_calls") or ()
        if calls and text_of(message):
            raise ChatError("a turn of this format is calls or an answer; move the text to reasoning_content")
        for call in calls:
            body = self.tokenizer.encode(call_body(call, tools))
            ids += [self._tags["call"], *body, self._tags["call_end"]]
        if not calls:
            ids += [self._tags["answer"], *self.tokenizer.encode(text_of(message)), self._tags["end"]]
        return ids

    def parse(self, ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Reads a sampled turn. One that is unclosed or outside the grammar has no calls and no content."""
        try:
            pieces = self._pieces(ids)
            reasoning, calls, content = _read_turn(pieces, self._tags)
            parsed = [read_call(body, tools, index) for index, body in enumerate(calls)]
        except Unreadable as error:
            message = {"role": "assistant", "content": "", "reasoning_content": self.tokenizer.decode(ids)}
            return ParsedTurn(message, str(error), not (ids and int(ids[-1]) in self.stop_ids))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if parsed:
            message["tool_calls"] = parsed
        return ParsedTurn(message)

    def stream(self, *, tools: Sequence[Tool] = ()) -> NanoStream:
        """Reads a turn while it is sampled."""
        return NanoStream(self, tools)

    def name_of(self, index: int) -> str | None:
        """Returns which tag of the wording a token is, by its field; "" for text, None for none of both."""
        if index in self._names:
            return self._names[index]
        return None if index in self._reserved or not 0 <= index < self.tokenizer.vocab_size else ""

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], images: ImageReader | None
    ) -> list[list[int] | PreparedImage]:
        pieces: list[list[int] | PreparedImage] = []
        bare = False
        for message in messages:
            role = message.get("role")
            if role == "assistant":
                pieces.append(self.render_assistant(message, tools=tools))
            elif role == "tool":
                observation, end = self._tags["observation"], self._tags["observation_end"]
                pieces += [[observation], *self._content(message, images), [end]]
            elif role in ("user", "system"):
                pieces += [self.tokenizer.encode("\n" if bare else ""), *self._content(message, images)]
            else:
                raise ChatError(f"role is system, user, assistant or tool, not {role!r}")
            bare = role in ("user", "system")
        return pieces

    def _content(self, message: Message, images: ImageReader | None) -> list[list[int] | PreparedImage]:
        if images is None:
            return [self.tokenizer.encode(text_of(message))]
        return [
            self.tokenizer.encode(part) if isinstance(part, str) else images.read(part)
            for part in parts_of(message)
        ]

    def _pieces(self, ids: Sequence[int]) -> list[int | str]:
        """Splits a turn into tag ids and the texts between them; adjacent characters are one text."""
        pieces: list[int | str] = []
        buffer: list[int] = []
        for index in map(int, ids):
            name = self.name_of(index)
            if name is None:
                raise Unreadable("bad token")
            if name:
                pieces += [self.tokenizer.decode(buffer), index] if buffer else [index]
                buffer = []
            else:
                buffer.append(index)
        return [*pieces, self.tokenizer.decode(buffer)] if buffer else pieces


def _read_turn(pieces: list[int | str], tags: Mapping[str, int]) -> tuple[str, list[str], str]:
    """Returns reasoning, bodies of the calls, and the answer."""
    rest = list(pieces)
    reasoning = _take_text(rest)
    calls: list[str] = []
    while rest and rest[0] == tags["call"]:
        rest.pop(0)
        calls.append(_take_text(rest))
        _take_tag(rest, tags["call_end"], "call")
    content = ""
    if calls:
        rest = rest[1:] if rest and rest[0] == tags["end"] else rest
    elif rest and rest[0] == tags["answer"]:
        rest.pop(0)
        content = _take_text(rest)
        _take_tag(rest, tags["end"], "answer")
    else:
        raise Unreadable("no call and no answer" if reasoning or rest else "empty turn")
    if rest:
        raise Unreadable("text after the call" if calls else "text after the answer")
    return reasoning, calls, content


def _take_text(rest: list[int | str]) -> str:
    return str(rest.pop(0)) if rest and isinstance(rest[0], str) else ""


def _take_tag(rest: list[int | str], tag: int, what: str) -> None:
    if not rest:
        raise Unreadable(f"{what} not closed")
    if rest.pop(0) != tag:
        raise Unreadable(f"tag inside the {what}")


def nano_chat() -> NanoChat:
    """Returns the chat format of the small presets with its own tokenizer."""
    return NanoChat(nano_tokenizer(), NanoWording())
