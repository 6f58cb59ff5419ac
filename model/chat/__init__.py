"""Chat formats: messages to token ids and back, with a wording that belongs to the checkpoint.

`load_chat(folder)` returns the format of a checkpoint, `nano_chat()` that of the small presets. Errors:

- `ChatError`: messages, effort or wording that cannot be rendered (parsing never raises)
- `ImageError`: an image of a message that cannot be used (see `model.images`)
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from model.chat.base import FILE_NAME, ChatError, ChatFormat, ParsedTurn
from model.chat.deepseek import DeepSeekChat, DeepSeekWording
from model.chat.nano import NanoChat, NanoWording, nano_chat
from model.chat.prompt import Prompt
from model.chat.stream import Event, EventKind, StreamParser
from model.chat.template import TemplateChat, has_template, load_template_chat
from model.tokenizer import Tokenizer

__all__ = [
    "ChatError",
    "ChatFormat",
    "DeepSeekChat",
    "DeepSeekWording",
    "Event",
    "EventKind",
    "NanoChat",
    "NanoWording",
    "ParsedTurn",
    "Prompt",
    "StreamParser",
    "TemplateChat",
    "load_chat",
    "nano_chat",
]


def load_chat(folder: Path) -> ChatFormat:
    """Reads the chat format and the tokenizer of a checkpoint folder.

    Raises:
        ChatError: `chat_format.json` is missing, damaged, of an unknown kind, or its wording is incomplete or
            has unknown fields.
        TokenizerError: `tokenizer.json` is missing or damaged.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        if has_template(folder):
            return load_template_chat(folder)
        raise ChatError(f"{path} is missing; save the chat format into the checkpoint with `ChatFormat.save`")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChatError(
            f"{path} is not a chat format ({error}); copy it again from the checkpoint"
        ) from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == NanoChat.kind:
        _check_keys(data, {"kind", "wording"}, f"{path}")
        return NanoChat(Tokenizer.load(folder), _wording(NanoWording, data["wording"], path))
    if kind == DeepSeekChat.kind:
        _check_keys(data, {"kind", "wording", "thinking"}, f"{path}")
        if not isinstance(data["thinking"], bool):
            raise ChatError(f"{path}: thinking is true or false, not {data['thinking']!r}")
        wording = _wording(DeepSeekWording, data["wording"], path)
        return DeepSeekChat(Tokenizer.load(folder), wording, thinking=data["thinking"])
    if kind == TemplateChat.kind:
        _check_keys(data, {"kind", "history", "thinking", "template"}, f"{path}")
        return load_template_chat(folder, data)
    kinds = ", ".join((NanoChat.kind, DeepSeekChat.kind, TemplateChat.kind))
    raise ChatError(f"{path} is of kind {kind!r}; known kinds: {kinds}")


_Wording = TypeVar("_Wording", NanoWording, DeepSeekWording)


def _wording(kind: type[_Wording], given: Any, path: Path) -> _Wording:
    """A checkpoint's whole wording: no field of it is made up here, and none is passed over."""
    where = f"the wording in {path}"
    _check_keys(given, {field.name for field in fields(kind)}, where)
    for name, value in given.items():
        wanted = {"effort_names": dict, "default_effort": int}.get(name, str)
        if not isinstance(value, wanted):
            raise ChatError(f"{where}: {name} is a {wanted.__name__}, not {value!r}")
    return kind(**given)


def _check_keys(given: Any, expected: set[str], where: str) -> None:
    if not isinstance(given, dict):
        raise ChatError(f"{where} is not an object; copy it again from the checkpoint")
    unknown, missing = sorted(given.keys() - expected), sorted(expected - given.keys())
    if unknown or missing:
        raise ChatError(
            f"{where} has unknown fields {unknown} and lacks {missing}: remove the unknown ones (or use the "
            "version that knows them), and add the missing ones"
        )
