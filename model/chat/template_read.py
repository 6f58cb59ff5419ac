"""Turns that models of `transformers` write, read back: thoughts in tags, calls in tags or as bare JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from model.chat.base import ParsedTurn, Tool, check_call, strict_json, tool_call
from model.chat.stream import Event, EventKind, StreamDecoder, StreamParser, held_back

if TYPE_CHECKING:
    from model.chat.base import ChatFormat

Syntax = Literal["tags", "json", "none"]
"""How calls are written: `<tool_call>` with a JSON object, a JSON object alone, or not at all."""
_OPEN, _CLOSE = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
_TAGS = (_OPEN, _CLOSE, _CALL)


def syntax_of(template: str) -> Syntax:
    """How the models of a template write calls."""
    if _CALL in template:
        return "tags"
    if "tool" in template and '"parameters"' in template:
        return "json"
    return "none"


@dataclass(frozen=True, slots=True)
class Reading:
    """A turn's text taken apart; `open` says what is not closed yet."""

    reasoning: str
    content: str
    bodies: tuple[str, ...] = ()
    open: Literal["", "thought", "call"] = ""


def read(text: str, syntax: Syntax, *, opened: bool) -> Reading:
    """Takes a turn apart; `opened`: its prompt has opened the thought already."""
    reasoning, rest = "", text
    if opened or text.lstrip().startswith(_OPEN):
        thought = text if opened else text.lstrip().removeprefix(_OPEN)
        inside, closed, rest = thought.partition(_CLOSE)
        reasoning = inside.strip()
        if not closed:
            return Reading(reasoning, "", open="thought")
    if syntax == "json":
        bare = rest.strip().removeprefix(_PYTHON).strip()
        if bare.startswith("{"):
            return Reading(reasoning, "", (bare,))
    if syntax != "tags" or _CALL not in rest:
        return Reading(reasoning, rest.strip())
    content, _, calls = rest.partition(_CALL)
    bodies = re.split(f"{_CALL_END}\\s*{_CALL}", calls)
    last, closed, after = bodies[-1].partition(_CALL_END)
    whole = (*bodies[:-1], last) if closed else tuple(bodies[:-1])
    if closed and after.strip():
        return Reading(reasoning, content.strip(), (*whole, after), "call")
    return Reading(
        reasoning, content.strip(), tuple(body.strip() for body in whole), "" if closed else "call"
    )


def parse_turn(text: str, syntax: Syntax, tools: Sequence[Tool], *, opened: bool, closed: bool) -> ParsedTurn:
    """Reads a whole turn; `closed`: its end token was sampled. Never raises."""
    found = read(text, syntax if tools else "none", opened=opened)
    message: dict[str, Any] = {"role": "assistant", "content": found.content}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    problem, calls = "", []
    if found.open == "thought":
        problem = f"the thought was not closed: end it with {_CLOSE}"
    elif found.open == "call":
        problem = f"the tool calls were not closed, or text follows them: end each with {_CALL_END}"
    for index, body in enumerate(found.bodies if not problem else ()):
        call, wrong = _call(body, index, tools)
        problem = problem or wrong
        calls.append(call)
    if calls and not problem:
        message["tool_calls"] = calls
    return ParsedTurn(message, problem, truncated=not closed)


def _call(body: str, index: int, tools: Sequence[Tool]) -> tuple[dict[str, Any] | None, str]:
    """A call, or what is wrong with it in words for the policy."""
    try:
        value = strict_json(body)
    except ValueError as error:
        return None, f"tool call {index + 1} is not JSON ({error})"
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None, f'tool call {index + 1} is an object with "name" and "arguments"'
    if wrong := check_call(name, arguments, tools):
        return None, wrong
    return tool_call(name, arguments, index), ""


class TemplateStream(StreamParser):
    """Shows what is certain of a turn: the part of its reading that no later token changes."""

    def __init__(self, chat: ChatFormat, tools: Sequence[Tool], syntax: Syntax, *, opened: bool) -> None:
        super().__init__(chat, tools)
        self._syntax: Syntax = syntax if tools else "none"
        self._opened = opened
        self._decoder = StreamDecoder(chat.tokenizer)
        self._text = ""
        self._shown = Reading("", "")

    def _read(self, ids: list[int]) -> list[Event]:
        if self._done:
            return []
        stopped = bool(ids) and ids[-1] in self._chat.stop_ids
        self._text += self._decoder.feed(ids[:-1] if stopped else ids)
        events = self._show(final=stopped)
        if stopped:
            self._done = True
            events.append(Event(EventKind.DONE))
        return events

    def _rest(self) -> list[Event]:
        if self._done:
            return []
        self._text += self._decoder.end()
        return self._show(final=True)

    def _show(self, *, final: bool) -> list[Event]:
        text = self._text if final else self._text[: len(self._text) - held_back(self._text, _TAGS)]
        now, events = read(text, self._syntax, opened=self._opened), []
        if not final and self._syntax == "json":
            now = Reading(now.reasoning, "" if not now.content or now.bodies else now.content)
        for kind, before, after in (
            (EventKind.REASONING, self._shown.reasoning, now.reasoning),
            (EventKind.CONTENT, self._shown.content, now.content),
        ):
            if len(after) > len(before):
                events.append(Event(kind, after[len(before) :]))
        closed = now.bodies if now.open != "call" or not final else ()
        for index in range(len(self._shown.bodies), len(closed)):
            call, wrong = _call(closed[index], index, self._tools)
            if call is None or wrong:
                break
            function = call["function"]
            events += [
                Event(EventKind.CALL_STARTED, index=index, name=function["name"]),
                Event(EventKind.ARGUMENTS, function["arguments"], index=index),
                Event(EventKind.CALL_FINISHED, index=index),
            ]
        bodies = closed if len(closed) > len(self._shown.bodies) else self._shown.bodies
        self._shown = Reading(now.reasoning, now.content, bodies)
        return events
