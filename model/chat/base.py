"""What a chat format is: the bridge between messages and token ids, which belongs to a checkpoint.

Messages are plain dicts in the shape of the OpenAI API: `role`, `content`, `reasoning_content`,
`tool_calls` (each with `function.name` and `function.arguments`, a JSON string) and `tool_call_id`. A
conversation is built by appending: the ids of a prompt, then sampled ids as they came, then the ids of an
observation, and so on. Sampled ids are never rendered again: what was sampled is what is trained on.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from model.chat.prompt import Prompt
from model.images import ImageReader
from model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from model.chat.stream import StreamParser

FILE_NAME = "chat_format.json"
IMAGE_KINDS = ("image", "image_url")
"""Types of content parts that are images; `model.images.source_of` says what they hold."""
Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class ChatError(ValueError):
    """Messages, an effort or a wording that cannot be rendered: what is wrong and what to change."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn as a message.

    `message` has `role` and `content`, and `reasoning_content` and `tool_calls` where there are any. When
    `parse_error` is not empty it says, in words meant for the policy, why the turn could not be read, and
    `message` then has no tool calls. `truncated` says that the ids end before the turn does.
    """

    message: dict[str, Any] = field(default_factory=dict)
    parse_error: str = ""
    truncated: bool = False


class ChatFormat(ABC):
    """Renders messages to ids and reads sampled ids back, with the wording of one checkpoint."""

    kind: ClassVar[str]
    tokenizer: Tokenizer
    stop_ids: frozenset[int]

    @abstractmethod
    def render_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), effort: int | None = None
    ) -> list[int]:
        """Renders a conversation up to and including what makes the assistant speak.

        Raises:
            ChatError: A message or the effort cannot be rendered.
        """

    @abstractmethod
    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """Renders what is appended after a sampled turn, including what makes the assistant speak again.

        Raises:
            ChatError: A message cannot be rendered.
        """

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        effort: int | None = None,
        images: ImageReader | None = None,
    ) -> Prompt:
        """Renders a conversation as `render_prompt`, with its images where the format has any.

        Raises:
            ChatError: A message or the effort cannot be rendered.
            ImageError: An image cannot be used.
        """
        return Prompt.of_pieces([self.render_prompt(messages, tools=tools, effort=effort)], images)

    def observation(self, messages: Sequence[Message], *, images: ImageReader | None = None) -> Prompt:
        """Renders an observation as `render_observation`, with its images where the format has any."""
        return Prompt.of_pieces([self.render_observation(messages)], images)

    def rewrites_history(self, tools: Sequence[Tool]) -> bool:
        """Whether earlier turns are rendered otherwise than they were sampled (reasoning that is dropped)."""
        return False

    def rewrites(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        effort: int | None = None,
    ) -> bool:
        """Whether the turns `before` are to be rendered anew, in another branch, when `new` follow them.

        Raises:
            ChatError: They would have to be, and that is not wanted.
        """
        return False

    @abstractmethod
    def render_assistant(self, message: Message) -> list[int]:
        """Renders a demonstration's turn, including its end token.

        Raises:
            ChatError: The message cannot be rendered.
        """

    @abstractmethod
    def parse(self, ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Reads a sampled turn. Never raises: what cannot be read is a `parse_error`."""

    @abstractmethod
    def stream(self, *, tools: Sequence[Tool] = ()) -> StreamParser:
        """Returns a parser to be fed a turn while it is sampled."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Returns the wording as JSON values."""

    def save(self, folder: Path) -> None:
        """Writes the wording and the tokenizer into a checkpoint folder."""
        self.tokenizer.save(folder)
        data = {"kind": self.kind, **self.to_dict()}
        (folder / FILE_NAME).write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")


def check_effort(effort: int) -> int:
    """Returns an effort in 1..100.

    Raises:
        ChatError: It is something else.
    """
    if isinstance(effort, bool) or not isinstance(effort, int) or not 1 <= effort <= 100:
        raise ChatError(f"effort is an integer from 1 to 100, not {effort!r}")
    return effort


def function_of(tool: Tool) -> Mapping[str, Any]:
    """Returns the function part of a tool or of a tool call."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"a tool needs a function with a name, not {tool!r}")
    return function


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a tool call, whether they are a JSON string or an object."""
    arguments = function_of(call).get("arguments", "{}")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise ChatError(f"the arguments of a tool call are not JSON ({error}): {arguments!r}") from error
    if not isinstance(value, Mapping):
        raise ChatError(f"the arguments of a tool call are a JSON object, not {value!r}")
    return dict(value)


def parts_of(message: Message) -> list[str | Mapping[str, Any]]:
    """Returns the content of a message: texts, and image parts as they are.

    Raises:
        ChatError: The content is no text and no list of text and image parts.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise ChatError(f"content is a text or a list of parts, not a {type(content).__name__}")
    parts: list[str | Mapping[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif kind in IMAGE_KINDS:
            parts.append(part)
        else:
            raise ChatError(f"a part of a message is text, image or image_url with its content, not {part!r}")
    return parts


def text_of(message: Message) -> str:
    """Returns the text of a message; content may be missing, a string, or a list of text parts."""
    parts = parts_of(message)
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) != len(parts):
        raise ChatError(f"text only stands here ({message.get('role')}); remove the parts that are not text")
    return "".join(texts)


def tool_call(name: str, arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Returns a tool call in the shape of the OpenAI API. Raises ValueError for values JSON does not have."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": text}}


def check_call(name: str, arguments: Mapping[str, Any], tools: Sequence[Tool]) -> str:
    """Returns what is wrong with a call, in words for the policy, or "" when the tools know it."""
    known = {str(function_of(tool)["name"]): function_of(tool) for tool in tools}
    if name not in known:
        return f"unknown tool {name}"
    missing = [
        key for key in (known[name].get("parameters") or {}).get("required", ()) if key not in arguments
    ]
    return f"missing {', '.join(missing)}" if missing else ""


def strict_json(text: str) -> Any:
    """Parses JSON without NaN and Infinity.

    Raises:
        ValueError: It is not JSON, or it is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
