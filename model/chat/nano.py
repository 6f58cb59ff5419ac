"""The chat format of the small presets: a handful of one-token tags and nothing else.

A conversation of a tool-using task reads, one token a character or tag::

    <effort>50 47*86= <call>47*86</call> <obs>4042</obs> <answer>4042<end>

A turn is free text (its reasoning) followed by calls or by an answer. Results of tools stand in observation
tags; other messages are bare, for a turn's own end delimits them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from model.chat.base import (
    ChatError,
    ChatFormat,
    Message,
    ParsedTurn,
    Tool,
    arguments_of,
    check_call,
    check_effort,
    function_of,
    strict_json,
    text_of,
    tool_call,
)
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


class _Unreadable(Exception):
    """A turn outside the grammar; its text goes to the policy, so it is short and in small letters."""


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
        ids: list[int] = []
        if effort is not None:
            ids += [self._tags["effort"], *self.tokenizer.encode(str(check_effort(effort)))]
            ids += [self._tags["effort_end"]] if "effort_end" in self._tags else []
        return ids + self._render(messages, tools)

    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """Renders tool results in observation tags, and other messages bare."""
        if any(message.get("role") == "assistant" for message in messages):
            raise ChatError("an observation is what others say; render an assistant's turn as such")
        return self._render(messages, ())

    def render_assistant(self, message: Message, *, tools: Sequence[Tool] = ()) -> list[int]:
        """Renders a demonstration's turn: calls when it has any, else an answer.

        Without `tools`, a call with one string argument is taken for a call of the only tool.
        """
        ids = self.tokenizer.encode(str(message.get("reasoning_content") or ""))
        calls = message.get("tool_calls") or ()
        if calls and text_of(message):
            raise ChatError("a turn of this format is calls or an answer; move the text to reasoning_content")
        for call in calls:
            body = self.tokenizer.encode(_call_body(call, tools))
            ids += [self._tags["call"], *body, self._tags["call_end"]]
        if not calls:
            ids += [self._tags["answer"], *self.tokenizer.encode(text_of(message)), self._tags["end"]]
        return ids

    def parse(self, ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Reads a sampled turn. One that is unclosed or outside the grammar has no calls and no content."""
        try:
            pieces = self._pieces(ids)
            reasoning, calls, content = _read_turn(pieces, self._tags)
            parsed = [_read_call(body, tools, index) for index, body in enumerate(calls)]
        except _Unreadable as error:
            message = {"role": "assistant", "content": "", "reasoning_content": self.tokenizer.decode(ids)}
            return ParsedTurn(message, str(error), not (ids and int(ids[-1]) in self.stop_ids))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if parsed:
            message["tool_calls"] = parsed
        return ParsedTurn(message)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        ids: list[int] = []
        bare = False
        for message in messages:
            role = message.get("role")
            if role == "assistant":
                ids += self.render_assistant(message, tools=tools)
            elif role == "tool":
                text = self.tokenizer.encode(text_of(message))
                ids += [self._tags["observation"], *text, self._tags["observation_end"]]
            elif role in ("user", "system"):
                ids += self.tokenizer.encode(f"\n{text_of(message)}" if bare else text_of(message))
            else:
                raise ChatError(f"role is system, user, assistant or tool, not {role!r}")
            bare = role in ("user", "system")
        return ids

    def _pieces(self, ids: Sequence[int]) -> list[int | str]:
        """Splits a turn into tag ids and the texts between them; adjacent characters are one text."""
        pieces: list[int | str] = []
        buffer: list[int] = []
        for index in map(int, ids):
            if index in self._names:
                pieces += [self.tokenizer.decode(buffer), index] if buffer else [index]
                buffer = []
            elif index in self._reserved or not 0 <= index < self.tokenizer.vocab_size:
                raise _Unreadable("bad token")
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
        raise _Unreadable("no call and no answer" if reasoning or rest else "empty turn")
    if rest:
        raise _Unreadable("text after the call" if calls else "text after the answer")
    return reasoning, calls, content


def _take_text(rest: list[int | str]) -> str:
    return str(rest.pop(0)) if rest and isinstance(rest[0], str) else ""


def _take_tag(rest: list[int | str], tag: int, what: str) -> None:
    if not rest:
        raise _Unreadable(f"{what} not closed")
    if rest.pop(0) != tag:
        raise _Unreadable(f"tag inside the {what}")


def _only_string_parameter(tool: Tool) -> str | None:
    """Returns the name of the only parameter of a tool when it is a string, else None."""
    properties = (function_of(tool).get("parameters") or {}).get("properties") or {}
    if len(properties) == 1:
        name, schema = next(iter(properties.items()))
        return name if isinstance(schema, Mapping) and schema.get("type") == "string" else None
    return None


def _call_body(call: Mapping[str, Any], tools: Sequence[Tool]) -> str:
    arguments = arguments_of(call)
    if tools:
        bare = len(tools) == 1 and _only_string_parameter(tools[0]) is not None
    else:
        bare = len(arguments) == 1 and isinstance(next(iter(arguments.values())), str)
    if bare:
        return str(next(iter(arguments.values())))
    return json.dumps({"name": function_of(call)["name"], "arguments": arguments}, ensure_ascii=False)


def _read_call(body: str, tools: Sequence[Tool], index: int) -> dict[str, Any]:
    if not tools:
        raise _Unreadable("there is no tool here")
    if not body:
        raise _Unreadable("empty call")
    parameter = _only_string_parameter(tools[0]) if len(tools) == 1 else None
    if parameter is not None:
        return tool_call(str(function_of(tools[0])["name"]), {parameter: body}, index)
    try:
        value = strict_json(body)
        name, arguments = value["name"], value["arguments"]
        if not isinstance(name, str) or not isinstance(arguments, dict) or len(value) != 2:
            raise TypeError
        if problem := check_call(name, arguments, tools):
            raise _Unreadable(problem)
        return tool_call(name, arguments, index)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _Unreadable("call is not json with name and arguments") from error


def nano_chat() -> NanoChat:
    """Returns the chat format of the small presets with its own tokenizer."""
    return NanoChat(nano_tokenizer(), NanoWording())
