"""Reading a turn while it is sampled: events as tokens come, and at the end the turn that `parse` gives.

Events are what can be shown at once. They are no verdict: a turn that turns out unreadable later has shown
its events already, and a tool call may be run only when `finish` returns it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from model.chat.base import ChatFormat, ParsedTurn, Tool
from model.tokenizer import Tokenizer

_UNDECIDED = "\N{REPLACEMENT CHARACTER}"
_MANY_PENDING = 8
_LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""


class EventKind(StrEnum):
    """What happened. What joins to the parsed turn does so when the turn has no parse error."""

    REASONING = "reasoning"
    """`text` continues the reasoning."""
    CONTENT = "content"
    """`text` continues the content."""
    CALL_STARTED = "call started"
    """Call `index` of tool `name` begins."""
    ARGUMENTS = "arguments"
    """`text` continues the JSON of the arguments of call `index`."""
    CALL_FINISHED = "call finished"
    """Call `index` is complete."""
    RESTARTED = "restarted"
    """All events so far are void: what was shown is reasoning after all, and `text` is all of it."""
    DONE = "done"
    """The turn has ended."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; `index` and `name` belong to calls."""

    kind: EventKind
    text: str = ""
    index: int = -1
    name: str = ""


class StreamParser(ABC):
    """A turn in the making. Never raises, whatever ids come."""

    def __init__(self, chat: ChatFormat, tools: Sequence[Tool]) -> None:
        self._chat, self._tools = chat, tools
        self._ids: list[int] = []
        self._done = False

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Takes the next sampled ids and returns what they make certain."""
        fresh = [int(index) for index in ids]
        self._ids += fresh
        return self._read(fresh)

    def end(self) -> list[Event]:
        """Says that no more ids come: what was held back (it might have become a tag), and DONE if due."""
        events = self._rest()
        if not self._done:
            self._done = True
            events.append(Event(EventKind.DONE))
        return events

    def finish(self) -> ParsedTurn:
        """Returns the turn: `ChatFormat.parse` of all ids that were fed."""
        return self._chat.parse(self._ids, tools=self._tools)

    @abstractmethod
    def _read(self, ids: list[int]) -> list[Event]: ...

    @abstractmethod
    def _rest(self) -> list[Event]: ...


class StreamDecoder:
    """Ids to text piece by piece; the pieces join to the text of all ids.

    Bytes of a character that is not complete yet are held back, never more than a few tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the text that these ids make certain."""
        text = []
        for index in ids:
            if 0 <= index < self._tokenizer.vocab_size:
                self._pending.append(index)
                text.append(self._certain())
        return "".join(text)

    def end(self) -> str:
        """Returns what was held back."""
        text, self._pending = self._tokenizer.decode(self._pending), []
        return text

    def _certain(self) -> str:
        text = self._tokenizer.decode(self._pending)
        if not text.endswith(_UNDECIDED):
            self._pending = []
            return text
        if len(self._pending) < _MANY_PENDING:
            return ""
        # Among so many tokens of at least a byte each, one of the last begins a character.
        for cut in range(len(self._pending) - _LONGEST_CHARACTER, len(self._pending)):
            head, tail = (self._tokenizer.decode(part) for part in (self._pending[:cut], self._pending[cut:]))
            if head + tail == text:
                self._pending = self._pending[cut:]
                return head
        return ""


def held_back(text: str, tags: Sequence[str]) -> int:
    """The length of the longest end of `text` that may yet become one of `tags`."""
    longest = min(len(text), max(map(len, tags)) - 1)
    for length in range(longest, 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0
