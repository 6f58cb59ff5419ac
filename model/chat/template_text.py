"""A Jinja chat template as text: rendered in a sandbox, what messages say kept apart from its own tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

from model.chat.base import ChatError, Message, Tool, arguments_of, function_of, parts_of

CONFIG = "tokenizer_config.json"
FILE = "chat_template.jinja"
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class Template:
    """A template and what it may name.

    Attributes:
        source: Jinja.
        config: the model's `tokenizer_config.json`.
        tags: special tokens, which stay text where a message spells one.
        extra: further variables.
    """

    source: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def found(folder: Path) -> bool:
        """Whether a folder has one."""
        return _source(folder, _read(folder)) is not None

    @staticmethod
    def load(folder: Path) -> Template:
        """Reads `chat_template.jinja`, or the template in `tokenizer_config.json`.

        Raises:
            ChatError: There is none.
        """
        config = _read(folder)
        source = _source(folder, config)
        if source is None:
            raise ChatError(
                f"{folder} has no chat template ({FILE}, or chat_template in {CONFIG}): take a model that "
                "was taught conversations, or write one"
            )
        return Template(source, config)

    def save(self, folder: Path) -> None:
        """Writes both files."""
        (folder / FILE).write_text(self.source, encoding="utf-8")
        config = {name: value for name, value in self.config.items() if name != "chat_template"}
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        (folder / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        generate: bool,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders messages, in whose texts special tokens are marked (see `parts`).

        Raises:
            ChatError: The template refuses them, or is broken.
        """
        from jinja2 import TemplateError

        special = {name: _token(self.config.get(name)) for name in _SPECIAL}
        keeps = "reasoning_content" in self.source
        prepared = [_message(message, self._mark, keeps) for message in messages]
        try:
            return _compiled(self.source).render(
                **special,
                **self.extra,
                **(more or {}),
                messages=prepared,
                tools=[_marked(tool, self._mark) for tool in tools] or None,
                add_generation_prompt=generate,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ChatError(f"the chat template does not take these messages: {error}") from error

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Splits a rendered text; True says that a part only spells a special token."""
        pieces = _MARK.split(text)
        for i, piece in enumerate(pieces):
            if i % 2:
                yield (_OPEN, *self.tags)[int(piece)], True
            elif piece:
                yield piece, False

    def _mark(self, text: str) -> str:
        """Text in which special tokens, and the mark itself, stand as their number between marks."""
        words = (_OPEN, *self.tags)
        pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if word)
        return re.sub(pattern, lambda found: f"{_OPEN}{words.index(found[0])}{_CLOSE}", text)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ChatError(f"{path} is not JSON ({error}); copy it again from the model") from error


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / FILE).is_file():
        return (folder / FILE).read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("tool_use") or named.get("default")
    return value


def _token(value: Any) -> str:
    return value.get("content", "") if isinstance(value, dict) else value or ""


def _message(message: Message, mark: Callable[[str], str], keeps_reasoning: bool) -> dict[str, Any]:
    """A message as templates expect it: text content, and arguments of calls as objects."""
    parts = parts_of(message)
    if not all(isinstance(part, str) for part in parts):
        raise ChatError("models of transformers take text only here: remove the images")
    content, reasoning = mark("".join(map(str, parts))), str(message.get("reasoning_content") or "")
    made: dict[str, Any] = {"role": _marked(message.get("role"), mark), "content": content}
    if reasoning and keeps_reasoning:
        made["reasoning_content"] = mark(reasoning)
    elif reasoning:
        made["content"] = f"<think>\n{mark(reasoning)}\n</think>\n\n{content}"
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            {
                "id": _marked(call.get("id"), mark),
                "type": "function",
                "function": {
                    "name": _marked(function_of(call)["name"], mark),
                    "arguments": _marked(arguments_of(call), mark),
                },
            }
            for call in calls
        ]
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            made[name] = _marked(message[name], mark)
    return made


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    """A value with all of its texts marked, names included: a caller may have written any of them."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return {mark(name): _marked(part, mark) for name, part in pairs}
    if isinstance(value, list | tuple):
        return [_marked(part, mark) for part in cast("Sequence[Any]", value)]
    return value


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ChatError("chat templates need the library jinja2: pip install 'tempering[hf]'") from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source))
    except TemplateSyntaxError as error:
        raise ChatError(f"the chat template is not Jinja (line {error.lineno}: {error.message})") from error


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
