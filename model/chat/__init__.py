"""Chat formats: messages to token ids and back, with a wording that belongs to the checkpoint.

`load_chat(folder)` returns the format of a checkpoint, `nano_chat()` that of the small presets. Errors:

- `ChatError`: messages, effort or wording that cannot be rendered (parsing never raises)
"""

from __future__ import annotations

import json
from pathlib import Path

from model.chat.base import FILE_NAME, ChatError, ChatFormat, ParsedTurn
from model.chat.deepseek import DeepSeekChat, DeepSeekWording
from model.chat.nano import NanoChat, NanoWording, nano_chat
from model.tokenizer import Tokenizer

__all__ = [
    "ChatError",
    "ChatFormat",
    "DeepSeekChat",
    "DeepSeekWording",
    "NanoChat",
    "NanoWording",
    "ParsedTurn",
    "load_chat",
    "nano_chat",
]


def load_chat(folder: Path) -> ChatFormat:
    """Reads the chat format and the tokenizer of a checkpoint folder.

    Raises:
        ChatError: `chat_format.json` is missing, damaged, or of an unknown kind.
        TokenizerError: `tokenizer.json` is missing or damaged.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise ChatError(f"{path} is missing; save the chat format into the checkpoint with `ChatFormat.save`")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind, wording = data["kind"], data["wording"]
        if kind == NanoChat.kind:
            return NanoChat(Tokenizer.load(folder), NanoWording(**wording))
        if kind == DeepSeekChat.kind:
            chat_wording = DeepSeekWording(**wording)
            return DeepSeekChat(Tokenizer.load(folder), chat_wording, thinking=data["thinking"])
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ChatError(
            f"{path} is not a chat format ({error}); copy it again from the checkpoint"
        ) from error
    raise ChatError(f"{path} is of kind {kind!r}; known kinds: {NanoChat.kind}, {DeepSeekChat.kind}")
