"""The published chat encoding of the large presets, with its wording passed in as data.

Source: the published encoder's behaviour. A prompt is a list of parts that are trusted (our own wording, in
which special tokens are meant) or not (what users and tools wrote, in which a special token spelt out stays
text). `render_text` joins the parts, `render_prompt` encodes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from model.chat.base import ChatError, ChatFormat, Message, ParsedTurn, Tool, check_effort
from model.chat.deepseek_parse import parse_text
from model.chat.deepseek_render import Part, Renderer
from model.chat.deepseek_stream import DeepSeekStream
from model.chat.prompt import Prompt
from model.images import ImageReader, PreparedImage
from model.tokenizer import Tokenizer

_TOOLS_SECTION = """## Tools

You can call the tools listed below. A turn that calls tools ends with one block of this form:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
...
</｜DSML｜ calls>

A string is written as it is, with string="true"; any other value is written as JSON, with string="false".

### Schemas

{schemas}
"""

_PLACEHOLDERS = {"tools_section": "{schemas}", "effort_line": "{effort}", "response_format": "{schema}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekWording:
    """The words and special strings of a checkpoint. `{schemas}`, `{effort}`, `{schema}` are filled in."""

    tools_section: str = _TOOLS_SECTION
    effort_line: str = "Reasoning Effort: {effort} (1-100, higher means more thorough)\n\n"
    response_format: str = "## Response Format:\n\nReply with JSON that follows this schema:\n{schema}"
    bos: str = "<｜begin▁of▁sentence｜>"
    eos: str = "<｜end▁of▁sentence｜>"
    user: str = "<｜User｜>"
    assistant: str = "<｜Assistant｜>"
    system: str = "<｜System｜>"
    dsml: str = "｜DSML｜"
    think: str = "<think>"
    think_end: str = "</think>"
    image: str = "<｜deepseek_image｜>"
    effort_names: Mapping[str, int] = field(
        default_factory=lambda: {"low": 50, "high": 75, "xhigh": 75, "max": 100}
    )
    default_effort: int = 75

    def __post_init__(self) -> None:
        for name, field_name in _PLACEHOLDERS.items():
            if getattr(self, name).count(field_name) != 1:
                raise ChatError(f"the wording's {name} must hold {field_name} once: {getattr(self, name)!r}")
        for value in (*self.effort_names.values(), self.default_effort):
            check_effort(value)

    def effort(self, value: int | str | None) -> int:
        """Returns an effort as a number; names and None are looked up.

        Raises:
            ChatError: An unknown name, or a number outside 1..100.
        """
        if isinstance(value, str):
            if value not in self.effort_names:
                raise ChatError(f"effort {value!r} is unknown; take 1..100 or {', '.join(self.effort_names)}")
            return self.effort_names[value]
        return self.default_effort if value is None else check_effort(value)


class DeepSeekChat(ChatFormat):
    """Renders and parses the published encoding; `thinking` decides whether turns begin with reasoning."""

    kind = "deepseek"

    def __init__(self, tokenizer: Tokenizer, wording: DeepSeekWording, *, thinking: bool = True) -> None:
        self.tokenizer = tokenizer
        self.wording = wording
        self.thinking = thinking
        self.stop_ids = frozenset((tokenizer.tag_id(wording.eos),))
        tags = sorted(tokenizer.tags, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, tags)) + ")")

    def to_dict(self) -> dict[str, Any]:
        """Returns the wording and the mode as JSON values."""
        return {"wording": asdict(self.wording), "thinking": self.thinking}

    def render_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), effort: int | None = None
    ) -> list[int]:
        """Renders a conversation; `tools` join those of the first system message.

        Without thinking there is no effort line, so the effort is not rendered.
        """
        return self._text_only(self._conversation(messages, tools, effort))

    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """Renders tool results (in the order of the calls) and messages as one user turn."""
        return self._text_only(self._reply(messages))

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
        return self._with_images(self._conversation(messages, tools, effort), images)

    def observation(self, messages: Sequence[Message], *, images: ImageReader | None = None) -> Prompt:
        """As `render_observation`, with images."""
        return self._with_images(self._reply(messages), images)

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool], effort: int | None
    ) -> list[Part]:
        renderer = Renderer(self.wording, thinking=self.thinking, keep_reasoning=False)
        return renderer.conversation(_with_tools(messages, tools), self.wording.effort(effort))

    def _reply(self, messages: Sequence[Message]) -> list[Part]:
        if any(message.get("role") == "assistant" for message in messages):
            raise ChatError("an observation is what others say; render an assistant's turn as such")
        return Renderer(self.wording, thinking=self.thinking, keep_reasoning=True).turns(messages)

    def rewrites_history(self, tools: Sequence[Tool]) -> bool:
        """Without tools, reasoning before the last user's turn is dropped."""
        return self.thinking and not tools

    def render_assistant(self, message: Message) -> list[int]:
        """Renders reasoning, content, calls and the end of the turn."""
        renderer = Renderer(self.wording, thinking=self.thinking, keep_reasoning=True)
        return self._text_only(renderer.assistant(message, reasoning=self.thinking))

    def parse(self, ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Reads a sampled turn from its text; ids outside the vocabulary are skipped."""
        text = self.tokenizer.decode(ids)
        return parse_text(text, self.wording, thinking=self.thinking, tools=tools)

    def stream(self, *, tools: Sequence[Tool] = ()) -> DeepSeekStream:
        """Reads a turn while it is sampled."""
        return DeepSeekStream(self, tools)

    def _text_only(self, parts: Sequence[Part]) -> list[int]:
        return self._with_images(parts, None).token_ids

    def _with_images(self, parts: Sequence[Part], reader: ImageReader | None) -> Prompt:
        pieces: list[list[int] | PreparedImage] = []
        run: list[Part] = []
        for part in parts:
            if part.image is None:
                run.append(part)
                continue
            if reader is None:
                raise ChatError(
                    "there is an image in the messages: render them with `prompt` or `observation` and "
                    "`images=ImageReader.of(policy.config)`, or remove the parts that are not text"
                )
            pieces += [self._encode(run), reader.read(part.image)]
            run = []
        return Prompt.of_pieces([*pieces, self._encode(run)], reader)

    def _encode(self, parts: Sequence[Part]) -> list[int]:
        """Encodes parts: special tokens of trusted parts become ids, all text between two of them one run."""
        ids: list[int] = []
        run: list[str] = []
        for part in parts:
            pieces = self._split.split(part.text) if part.trusted else [part.text]
            for number, piece in enumerate(pieces):
                if number % 2:
                    ids += [*self.tokenizer.encode("".join(run)), self.tokenizer.tag_id(piece)]
                    run = []
                else:
                    run.append(piece)
        return ids + self.tokenizer.encode("".join(run))


def render_text(
    messages: Sequence[Message],
    wording: DeepSeekWording,
    *,
    thinking: bool,
    effort: int | str | None = None,
    drop_reasoning: bool = True,
) -> str:
    """Renders a conversation to the exact prompt string."""
    renderer = Renderer(wording, thinking=thinking, keep_reasoning=not drop_reasoning)
    return "".join(part.text for part in renderer.conversation(messages, wording.effort(effort)))


def _with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    if not tools:
        return list(messages)
    rest = list(messages)
    first: dict[str, Any] = {"role": "system", "content": ""}
    if rest and rest[0].get("role") == "system":
        first = dict(rest.pop(0))
    first["tools"] = [*(first.get("tools") or ()), *tools]
    return [first, *rest]
