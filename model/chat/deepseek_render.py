"""Rendering of the published chat encoding: which words stand where in a conversation.

Rules: a first system message (or thinking) opens with the system tag, the effort line in thinking, the
content, the tool section and the response format. Users' messages and tool results in a row are one user
turn, results in the order of the calls before them. A user turn, or a system message in mid-conversation,
lets the assistant speak. Reasoning before the last such turn is dropped unless a message defines tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model.chat.base import ChatError, Message, arguments_of, function_of, parts_of, text_of

if TYPE_CHECKING:
    from model.chat.deepseek import DeepSeekWording


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt; in a trusted one special tokens are meant, in another they are text."""

    text: str
    trusted: bool = True
    image: Mapping[str, Any] | None = None
    """The content part of the image that `text` stands for."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant's message, a system message in mid-conversation, or user and tool messages in a row."""

    role: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders conversations with one wording. `keep_reasoning` keeps all reasoning, wherever it stands."""

    wording: DeepSeekWording
    thinking: bool
    keep_reasoning: bool

    def conversation(self, messages: Sequence[Message], effort: int) -> list[Part]:
        """Renders a whole prompt, up to the assistant's header when somebody else spoke last."""
        if not messages:
            raise ChatError("a prompt needs at least one message")
        rest = list(messages)
        parts = [Part(self.wording.bos)]
        system = rest.pop(0) if rest[0].get("role") == "system" else None
        if system is not None or self.thinking:
            parts.append(Part(self.wording.system))
        if self.thinking:
            parts.append(Part(self.wording.effort_line.replace("{effort}", str(effort))))
        if system is not None:
            parts += self._system(system)
        keep = self.keep_reasoning or any(message.get("tools") for message in messages)
        return parts + Renderer(self.wording, self.thinking, keep).turns(rest, alone=system is not None)

    def turns(self, messages: Sequence[Message], *, alone: bool = False) -> list[Part]:
        """Renders what follows the opening; with `alone` the opening itself lets the assistant speak."""
        turns = list(_turns(messages))
        last = max((i for i, turn in enumerate(turns) if turn.role != "assistant"), default=-1)
        parts = self._header(True) if alone and (not turns or turns[0].role == "assistant") else []
        for i, turn in enumerate(turns):
            reasoned = self.thinking and (self.keep_reasoning or i >= last)
            if turn.role == "assistant":
                parts += self.assistant(turn.messages[0], reasoning=reasoned)
            else:
                parts += self._user(turn) if turn.role == "user" else self._mid_system(turn)
                if i + 1 == len(turns) or turns[i + 1].role == "assistant":
                    parts += self._header(reasoned)
        return parts

    def assistant(self, message: Message, *, reasoning: bool) -> list[Part]:
        """Renders an assistant's turn after its header, with its end."""
        parts: list[Part] = []
        if reasoning:
            parts += [Part(str(message.get("reasoning_content") or ""), False), Part(self.wording.think_end)]
        parts.append(Part(text_of(message), False))
        if calls := message.get("tool_calls") or ():
            parts += self._calls(calls)
        return [*parts, Part(self.wording.eos)]

    def _header(self, reasoned: bool) -> list[Part]:
        think = self.wording.think if reasoned and self.thinking else self.wording.think_end
        return [Part(self.wording.assistant + think)]

    def _system(self, message: Message) -> list[Part]:
        parts = [Part(text_of(message), False)]
        if tools := message.get("tools"):
            before, after = self.wording.tools_section.split("{schemas}")
            schemas = "\n".join(json.dumps(function_of(tool), ensure_ascii=False) for tool in tools)
            parts += [Part("\n\n" + before), Part(schemas, False), Part(after)]
        if schema := message.get("response_format"):
            before, after = self.wording.response_format.split("{schema}")
            text = json.dumps(schema, ensure_ascii=False)
            parts += [Part("\n\n" + before), Part(text, False), Part(after)]
        return parts

    def _mid_system(self, turn: _Turn) -> list[Part]:
        return [Part(self.wording.system), *self._system(turn.messages[0])]

    def _user(self, turn: _Turn) -> list[Part]:
        parts = [Part(self.wording.user)]
        for number, message in enumerate(turn.messages):
            parts += [Part("\n\n")] if number else []
            content = self._content(message)
            is_result = message.get("role") == "tool"
            parts += [Part("<tool_result>"), *content, Part("</tool_result>")] if is_result else content
        return parts

    def _content(self, message: Message) -> list[Part]:
        return [
            Part(part, False) if isinstance(part, str) else Part(self.wording.image, image=part)
            for part in parts_of(message)
        ]

    def _calls(self, calls: Sequence[Any]) -> list[Part]:
        tag = self.wording.dsml
        parts = [Part(f"\n\n<{tag} calls>\n")]
        for call in calls:
            name = str(function_of(call)["name"])
            parts += [Part(f'<{tag} invoke name="'), Part(name, False), Part('">\n')]
            for key, value in arguments_of(call).items():
                is_text = isinstance(value, str)
                text = value if is_text else json.dumps(value, ensure_ascii=False)
                parts += [Part(f'<{tag} parameter name="'), Part(key, False)]
                parts += [Part(f'" string="{"true" if is_text else "false"}">'), Part(text, False)]
                parts.append(Part(f"</{tag} parameter>\n"))
            parts.append(Part(f"</{tag} invoke>\n"))
        return [*parts, Part(f"</{tag} calls>")]


def _turns(messages: Sequence[Message]) -> Iterator[_Turn]:
    """Groups messages into turns, tool results in the order of the calls they answer."""
    order: dict[str, int] = {}
    row: list[Message] = []
    for message in messages:
        role = message.get("role")
        if role in ("user", "tool"):
            row.append(message)
            continue
        if role not in ("assistant", "system"):
            raise ChatError(f"role is system, user, assistant or tool, not {role!r}")
        if row:
            yield _Turn("user", _in_order(row, order))
            row = []
        if role == "assistant":
            calls = message.get("tool_calls") or ()
            order = {str(call.get("id", "")): number for number, call in enumerate(calls)}
        yield _Turn(str(role), (message,))
    if row:
        yield _Turn("user", _in_order(row, order))


def _in_order(row: Sequence[Message], order: dict[str, int]) -> tuple[Message, ...]:
    """Puts tool results in the order of their calls; unknown ones and other messages keep their places."""
    places = [i for i, message in enumerate(row) if str(message.get("tool_call_id", "")) in order]
    results = sorted((row[i] for i in places), key=lambda message: order[str(message["tool_call_id"])])
    ordered = list(row)
    for place, message in zip(places, results, strict=True):
        ordered[place] = message
    return tuple(ordered)
