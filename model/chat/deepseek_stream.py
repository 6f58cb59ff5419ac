"""The published encoding read while it is sampled: a small machine that goes from tag to tag.

It follows the grammar of `deepseek_parse` and stops showing anything at the first thing outside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from model.chat.base import Tool, strict_json
from model.chat.stream import Event, EventKind, StreamDecoder, StreamParser, held_back

if TYPE_CHECKING:
    from model.chat.deepseek import DeepSeekChat


class DeepSeekStream(StreamParser):
    """One turn of the published encoding. Each `_in_*` method reads on in its state while it can."""

    def __init__(self, chat: DeepSeekChat, tools: Sequence[Tool]) -> None:
        super().__init__(chat, tools)
        self._wording, self._thinking = chat.wording, chat.thinking
        tag = chat.wording.dsml
        self._open, self._close = f"<{tag} calls>", f"</{tag} calls>"
        self._invoke, self._invoke_end = f'<{tag} invoke name="', f"</{tag} invoke>"
        self._parameter, self._parameter_end = f'<{tag} parameter name="', f"</{tag} parameter>"
        self._decoder = StreamDecoder(chat.tokenizer)
        self._buffer = ""
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._in_start
        self._index = 0
        self._keys: set[str] = set()
        self._value: list[str] = []
        # Without thinking, a closing tag makes all that came before it reasoning.
        self._may_restart = False
        self._seen: list[str] = []
        self._window = ""

    def _read(self, ids: list[int]) -> list[Event]:
        return self._advance(self._decoder.feed(ids))

    def _rest(self) -> list[Event]:
        events = self._advance(self._decoder.end())
        text, self._buffer = self._buffer, ""
        unopened = self._state == self._in_start and not self._thinking
        if self._state == self._in_content or unopened:
            self._show(EventKind.CONTENT, text)
        elif self._state in (self._in_reasoning, self._in_start):
            self._show(EventKind.REASONING, text)
        return events

    def _advance(self, text: str) -> list[Event]:
        self._events = []
        if self._done:
            return self._events
        if self._may_restart:
            text = self._restarted(text)
        self._buffer += text
        while self._state():
            pass
        return self._events

    def _show(self, kind: EventKind, text: str) -> None:
        if text:
            index = self._index if kind is EventKind.ARGUMENTS else -1
            self._events.append(Event(kind, text, index))

    def _until(self, *tags: str, hold: tuple[str, ...] = ()) -> tuple[str, str]:
        """Takes text up to the first of `tags` and the tag; without one, text that cannot belong to any."""
        places = [(place, tag) for tag in tags if (place := self._buffer.find(tag)) >= 0]
        if places:
            place, tag = min(places)
            text, self._buffer = self._buffer[:place], self._buffer[place + len(tag) :]
            return text, tag
        certain = len(self._buffer) - held_back(self._buffer, (*tags, *hold))
        text, self._buffer = self._buffer[:certain], self._buffer[certain:]
        return text, ""

    def _next(self, *tags: str) -> str | None:
        """Takes one of `tags` after white space. None: it may yet come; "": something else is there."""
        self._buffer = self._buffer.lstrip()
        for tag in tags:
            if self._buffer.startswith(tag):
                self._buffer = self._buffer[len(tag) :]
                return tag
        return None if any(tag.startswith(self._buffer) for tag in tags) else ""

    def _fail(self) -> bool:
        self._state = self._in_rest
        return True

    def _end_turn(self) -> bool:
        self._done = True
        self._state, self._buffer = self._in_rest, ""
        self._events.append(Event(EventKind.DONE))
        return False

    def _in_start(self) -> bool:
        think = self._wording.think
        if len(self._buffer) < len(think) and think.startswith(self._buffer):
            return False
        opened = self._buffer.startswith(think)
        self._buffer = self._buffer.removeprefix(think)
        self._state = self._in_reasoning if opened or self._thinking else self._in_content
        if not opened and not self._thinking:
            self._may_restart = True
            text, self._buffer = self._buffer, ""
            self._buffer = self._restarted(text)
        return True

    def _restarted(self, text: str) -> str:
        """Text to read on with, after making reasoning of everything when the closing tag has come."""
        close, end = self._wording.think_end, self._wording.eos
        window = self._window + text
        place, last = window.find(close), window.find(end)
        if place < 0 or 0 <= last < place:
            self._may_restart = last < 0
            self._seen.append(text)
            self._window = window[-max(len(close), len(end)) + 1 :]
            return text
        whole = "".join(self._seen) + text
        place += len(whole) - len(window)
        self._may_restart, self._buffer = False, ""
        self._index, self._state = 0, self._in_content
        self._events.append(Event(EventKind.RESTARTED, whole[:place]))
        return whole[place + len(close) :]

    def _in_reasoning(self) -> bool:
        text, tag = self._until(self._wording.think_end, self._wording.eos)
        self._show(EventKind.REASONING, text)
        if tag == self._wording.eos:
            return self._end_turn()
        self._state = self._in_content if tag else self._state
        return bool(tag)

    def _in_content(self) -> bool:
        hold = ("\n\n" + self._open, self._wording.think_end)
        text, tag = self._until(self._open, self._wording.eos, hold=hold)
        self._show(EventKind.CONTENT, text.removesuffix("\n\n") if tag == self._open else text)
        if tag == self._wording.eos:
            return self._end_turn()
        self._state = self._in_calls if tag else self._state
        return bool(tag)

    def _in_calls(self) -> bool:
        tag = self._next(self._invoke, self._close)
        if tag is None:
            return False
        self._state = {self._invoke: self._in_name, self._close: self._in_rest}.get(tag, self._in_rest)
        return True

    def _quoted(self, *ends: str) -> tuple[str, str] | None:
        """Takes a name and what ends it, which begins with a quote. None: wait; ("", ""): failed."""
        place = self._buffer.find('"')
        name = self._buffer if place < 0 else self._buffer[:place]
        if any(mark in name for mark in ("\n", self._wording.eos, self._close)):
            self._fail()
            return "", ""
        if place < 0:
            return None
        rest = self._buffer[place:]
        for end in ends:
            if rest.startswith(end):
                self._buffer = rest[len(end) :]
                return name, end
        if any(end.startswith(rest) for end in ends):
            return None
        self._fail()
        return "", ""

    def _in_name(self) -> bool:
        found = self._quoted('">')
        if found is None or not found[1]:
            return found is not None
        self._events.append(Event(EventKind.CALL_STARTED, index=self._index, name=found[0]))
        self._keys = set()
        self._state = self._in_parameters
        return True

    def _in_parameters(self) -> bool:
        tag = self._next(self._parameter, self._invoke_end)
        if tag is None:
            return False
        if tag == self._invoke_end:
            self._show(EventKind.ARGUMENTS, "}" if self._keys else "{}")
            self._events.append(Event(EventKind.CALL_FINISHED, index=self._index))
            self._index += 1
        states = {self._parameter: self._in_key, self._invoke_end: self._in_calls}
        self._state = states.get(tag, self._in_rest)
        return True

    def _in_key(self) -> bool:
        text_end = '" string="true">'
        found = self._quoted(text_end, '" string="false">')
        if found is None or not found[1]:
            return found is not None
        key, end = found
        if key in self._keys:
            return self._fail()
        before = ", " if self._keys else "{"
        self._keys.add(key)
        self._show(EventKind.ARGUMENTS, f"{before}{_json(key)}: " + ('"' if end == text_end else ""))
        self._value = []
        self._state = self._in_text if end == text_end else self._in_json
        return True

    def _value_until(self) -> tuple[str, str]:
        """Text of a value and the tag that ends it; any but its own fails, and is left to be read."""
        text, tag = self._until(self._parameter_end, self._close, self._wording.eos)
        if tag and tag != self._parameter_end:
            self._buffer = tag + self._buffer
            self._fail()
        return text, tag

    def _in_text(self) -> bool:
        text, tag = self._value_until()
        self._show(EventKind.ARGUMENTS, _json(text)[1:-1])
        if tag == self._parameter_end:
            self._show(EventKind.ARGUMENTS, '"')
            self._state = self._in_parameters
        return bool(tag)

    def _in_json(self) -> bool:
        text, tag = self._value_until()
        self._value.append(text)
        if tag != self._parameter_end:
            return bool(tag)
        try:
            value = json.dumps(strict_json("".join(self._value)), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return self._fail()
        self._show(EventKind.ARGUMENTS, value)
        self._state = self._in_parameters
        return True

    def _in_rest(self) -> bool:
        """After the calls, or after what is outside the grammar: only the end of the turn counts."""
        _, tag = self._until(self._wording.eos)
        return self._end_turn() if tag else False


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
