"""One turn read while it is sampled: what the caller may be shown, and where a stop text ends it.

Text goes out as it becomes certain. Calls are held until the turn is over and readable: a caller runs what it
is shown, and only the whole turn says whether a call is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from model.chat import ChatFormat, EventKind, ParsedTurn
from model.chat.stream import held_back

Show = Callable[[dict[str, Any]], None]
"""Takes a delta of an assistant's message."""


class TurnReader:
    """Reads the tokens of one turn.

    Args:
        chat: The chat format.
        tools: The tools that the policy was shown.
        stops: Texts at which the content ends.
        show: Called with each delta of content or reasoning; None: nobody looks.
    """

    def __init__(
        self, chat: ChatFormat, tools: Sequence[Any], stops: Sequence[str], show: Show | None = None
    ) -> None:
        self._stream = chat.stream(tools=tools)
        self._stops, self._show = tuple(stops), show
        self._fed = 0
        self._held = ""
        self.content, self.reasoning = "", ""
        self.stopped = False

    @property
    def wants_tokens(self) -> bool:
        """Whether it must see tokens as they come."""
        return self._show is not None or bool(self._stops)

    def feed(self, ids: Sequence[int]) -> bool:
        """Takes the next tokens; returns whether a stop text has ended the turn."""
        if self.stopped:
            return True
        self._fed += len(ids)
        self._take(self._stream.feed(ids))
        return self.stopped

    def finish(self, ids: Sequence[int]) -> ParsedTurn:
        """Takes all tokens of the turn, those that were fed included, and returns it."""
        self.feed(ids[self._fed :])
        if not self.stopped:
            self._take(self._stream.end())
            self._content("", last=True)
        return self._stream.finish()

    def _take(self, events: Sequence[Any]) -> None:
        for event in events:
            if self.stopped:
                return
            if event.kind is EventKind.CONTENT:
                self._content(event.text)
            elif event.kind in (EventKind.REASONING, EventKind.RESTARTED):
                self._out("reasoning_content", event.text)

    def _content(self, text: str, *, last: bool = False) -> None:
        text, self._held = self._held + text, ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            text = text[: min(found)]
        elif self._stops and not last:
            cut = len(text) - held_back(text, self._stops)
            text, self._held = text[:cut], text[cut:]
        self._out("content", text)

    def _out(self, name: str, text: str) -> None:
        if not text:
            return
        if name == "content":
            self.content += text
        else:
            self.reasoning += text
        if self._show is not None:
            self._show({name: text})
