"""The format of the small presets read while it is sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from model.chat.base import Tool, function_of
from model.chat.nano_calls import Unreadable, only_string_parameter, read_call
from model.chat.stream import Event, EventKind, StreamDecoder, StreamParser

if TYPE_CHECKING:
    from model.chat.nano import NanoChat

_NEXT = {
    "reasoning": {"call", "answer"},
    "call": {"call_end"},
    "between": {"call", "end"},
    "answer": {"end"},
    "over": set[str](),
}
"""The tags that may follow in each state."""


class NanoStream(StreamParser):
    """One turn of the one-token tags: reasoning, then calls or an answer."""

    def __init__(self, chat: NanoChat, tools: Sequence[Tool]) -> None:
        super().__init__(chat, tools)
        self._name_of: Callable[[int], str | None] = chat.name_of
        self._decoder = StreamDecoder(chat.tokenizer)
        self._state = "reasoning"
        self._index = 0
        self._body: list[str] = []
        self._events: list[Event] = []
        # A tool with one string parameter takes the text as it is.
        self._parameter = only_string_parameter(tools[0]) if len(tools) == 1 else None

    def _read(self, ids: list[int]) -> list[Event]:
        self._events = []
        for index in ids:
            name = self._name_of(index)
            if name is None:
                self._state = "over"
            elif name:
                self._text(self._decoder.end())
                self._tag(name)
            else:
                self._text(self._decoder.feed([index]))
        return self._events

    def _rest(self) -> list[Event]:
        self._events = []
        self._text(self._decoder.end())
        return self._events

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._state in ("reasoning", "answer"):
            kind = EventKind.REASONING if self._state == "reasoning" else EventKind.CONTENT
            self._events.append(Event(kind, text))
        elif self._state == "call":
            if self._parameter is not None:
                before = "" if self._body else f'{{{_json(self._parameter)}: "'
                self._arguments(before + _json(text)[1:-1])
            self._body.append(text)
        else:
            self._state = "over"

    def _tag(self, name: str) -> None:
        allowed = name in _NEXT[self._state]
        if name == "end" and not self._done:
            self._done = True
            self._events.append(Event(EventKind.DONE))
        if not allowed or name == "end":
            self._state = "over"
        elif name == "call":
            self._open_call()
        elif name == "call_end":
            self._close_call()
        else:
            self._state = "answer"

    def _open_call(self) -> None:
        self._body = []
        self._state = "call" if self._tools else "over"
        if self._parameter is not None:
            self._started(str(function_of(self._tools[0])["name"]))

    def _close_call(self) -> None:
        try:
            call = read_call("".join(self._body), self._tools, self._index)["function"]
        except Unreadable:
            self._state = "over"
            return
        if self._parameter is None:
            self._started(call["name"])
            self._arguments(call["arguments"])
        else:
            self._arguments('"}')
        self._events.append(Event(EventKind.CALL_FINISHED, index=self._index))
        self._index += 1
        self._state = "between"

    def _started(self, name: str) -> None:
        self._events.append(Event(EventKind.CALL_STARTED, index=self._index, name=name))

    def _arguments(self, text: str) -> None:
        self._events.append(Event(EventKind.ARGUMENTS, text, self._index))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
