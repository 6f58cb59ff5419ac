"""The chat format of a model of `transformers`: its own Jinja template, appended to and never rendered again.

A conversation grows by differences of rendered text. What a template writes behind the end of an assistant's
turn, when messages are added, is encoded and appended; tokens that were sampled stay as they are. For that,
text before must stay the same: a template that writes earlier turns otherwise once others follow (it drops
reasoning, say) is noticed by comparing both texts, and then there is an error, a new branch, or the sampled
text is kept, as `history` says. Text of messages that merely spells a special token never becomes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from model.chat.base import ChatError, ChatFormat, Message, ParsedTurn, Tool, check_effort
from model.chat.template_read import Syntax, TemplateStream, parse_turn, syntax_of
from model.chat.template_text import Template
from model.tokenizer import Tokenizer

History = Literal["error", "fork", "keep"]
_ASK: Message = {"role": "user", "content": "u"}
_REPLY = "a"


class TemplateChat(ChatFormat):
    """Renders with a model's own template and reads the turns that it was trained to write.

    Args:
        tokenizer: the model's.
        template: its chat template.
        stop_ids: that end a turn, besides the one the template ends it with.
        history: what to do when the template rewrites earlier turns.
        thinking: given to the template as `enable_thinking`; None: not given.

    Raises:
        ChatError: The template cannot be used: it does not end an assistant's turn with a special token, say.
    """

    kind = "template"

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        *,
        stop_ids: Iterable[int] = (),
        history: History = "error",
        thinking: bool | None = None,
    ) -> None:
        self.tokenizer, self.history, self.thinking = tokenizer, history, thinking
        extra = {} if thinking is None else {"enable_thinking": thinking}
        self.template = replace(template, tags=tuple(tokenizer.tags), extra=extra)
        self.syntax: Syntax = syntax_of(template.source)
        self.end = self._end_of_turn()
        self.stop_ids = frozenset((tokenizer.tag_id(self.end), *stop_ids))
        prompt = self.template.render([_ASK], generate=True)
        self.opens_thinking = prompt.rstrip().endswith("<think>")

    @property
    def tells_effort(self) -> bool:
        """Whether the template writes the effort down."""
        return "effort" in self.template.source

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings and the template."""
        return {"history": self.history, "thinking": self.thinking, "template": self.template.source}

    def with_settings(self, history: History, thinking: bool | None) -> TemplateChat:
        """The same template under other settings."""
        return TemplateChat(
            self.tokenizer, self.template, stop_ids=self.stop_ids, history=history, thinking=thinking
        )

    def render_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), effort: int | None = None
    ) -> list[int]:
        """Renders a conversation up to what makes the assistant speak."""
        return self._encode(self._text(messages, tools, effort, generate=True))

    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """Renders what is appended behind a sampled turn, whose end token was sampled.

        Raises:
            ChatError: The template changes what was said before, whatever that is.
        """
        calls = sum(message.get("role") == "tool" for message in messages)
        reply = _calling(calls) if calls else {"role": "assistant", "content": _REPLY}
        before = self._said(self._text([_ASK, reply], (), None, generate=False))
        after = self._text([_ASK, reply, *messages], (), None, generate=True)
        if not after.startswith(before):
            raise ChatError(
                "this chat template writes a turn otherwise once messages follow it, whatever it says: "
                "nothing can be appended; change the template, or run single turns"
            )
        ids = self._encode(self.end + after[len(before) :])
        assert ids[0] == self.tokenizer.tag_id(self.end)
        return ids[1:]

    def rewrites(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        effort: int | None = None,
    ) -> bool:
        """Whether a new branch is to begin, because the template writes `before` otherwise when `new` follow.

        Raises:
            ChatError: It does, and `history` is "error".
        """
        if self.history == "keep" or not self._differs(before, new, tools, effort):
            return False
        if self.history == "fork":
            return True
        raise ChatError(
            "this chat template writes earlier turns otherwise than they were sampled once messages follow "
            "(it drops their reasoning, say), so tokens cannot be appended: set policy.history=fork to go "
            "on in a new branch, or policy.history=keep to keep what was sampled"
        )

    def rewrites_history(self, tools: Sequence[Tool]) -> bool:
        """Whether a turn with reasoning is rendered otherwise once a user's message follows it."""
        thought = {"role": "assistant", "content": _REPLY, "reasoning_content": "r"}
        return self.history != "keep" and self._differs([_ASK, thought], [_ASK], tools, None)

    def render_assistant(self, message: Message, *, tools: Sequence[Tool] = ()) -> list[int]:
        """Renders a demonstration's turn with its end token.

        Raises:
            ChatError: The template does not write it behind what makes the assistant speak.
        """
        prompt = self._text([_ASK], tools, None, generate=True)
        whole = self._said(self._text([_ASK, message], tools, None, generate=False))
        if not whole.startswith(prompt):
            raise ChatError(
                "this chat template begins an assistant's turn otherwise than it asks for one (an empty "
                "thought, say): set policy.thinking to what the demonstrations have"
            )
        before, ids = self._encode(prompt), self._encode(whole)
        if ids[: len(before)] == before:
            return ids[len(before) :]
        return self._encode(whole[len(prompt) :])

    def parse(self, ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Reads a sampled turn."""
        closed = bool(ids) and int(ids[-1]) in self.stop_ids
        text = self.tokenizer.decode(ids[:-1] if closed else ids)
        return parse_turn(text, self.syntax, tools, opened=self.opens_thinking, closed=closed)

    def stream(self, *, tools: Sequence[Tool] = ()) -> TemplateStream:
        """Reads a turn while it is sampled."""
        return TemplateStream(self, tools, self.syntax, opened=self.opens_thinking)

    def save(self, folder: Path) -> None:
        """Writes the wording, and the files that `transformers` reads."""
        super().save(folder)
        self.template.save(folder)

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Tool], effort: int | None, *, generate: bool
    ) -> str:
        if tools and self.syntax == "none":
            raise ChatError(
                "this chat template knows no tool calls (none of <tool_call>, or JSON with parameters): take "
                "an environment without tools, or another model"
            )
        told = {} if effort is None else {"effort": check_effort(effort), "reasoning_effort": effort}
        return self.template.render(messages, tools=tools, generate=generate, more=told)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part, spelt in self.template.parts(text):
            ids += self.tokenizer.encode(part) if spelt else self.tokenizer.encode_tagged(part)
        return ids

    def _said(self, text: str) -> str:
        """A rendered conversation up to the end token of its last turn."""
        found = text.rfind(self.end)
        if found < 0:
            raise ChatError(
                f"this chat template leaves out {self.end} behind some turns: nothing can be appended"
            )
        return text[: found + len(self.end)]

    def _differs(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], effort: int | None
    ) -> bool:
        said = self._said(self._text(before, tools, effort, generate=False))
        return not self._text([*before, *new], tools, effort, generate=True).startswith(said)

    def _end_of_turn(self) -> str:
        text = self.template.render([_ASK, {"role": "assistant", "content": "REPLY"}], generate=False)
        rest = text.partition("REPLY")[2]
        tags = sorted((rest.find(tag), tag) for tag in self.tokenizer.tags if tag in rest)
        if not tags:
            raise ChatError(
                "this chat template ends an assistant's turn with no special token of its tokenizer, so it "
                "cannot be told when a turn is over: take a template that does"
            )
        return tags[0][1]


def load_template_chat(folder: Path, settings: dict[str, Any] | None = None) -> TemplateChat:
    """Reads the tokenizer and the chat template of a folder of `transformers`.

    Raises:
        ChatError: It has no chat template, or one that cannot be used.
        TokenizerError: It has no tokenizer.
    """
    given = settings or {}
    return TemplateChat(
        Tokenizer.load(folder),
        Template.load(folder),
        stop_ids=_stop_ids(folder),
        history=given.get("history", "error"),
        thinking=given.get("thinking"),
    )


def has_template(folder: Path) -> bool:
    """Whether a folder has a chat template of `transformers`."""
    return Template.found(folder)


def _stop_ids(folder: Path) -> list[int]:
    """Ids that end a generation by the model's own files."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if value is not None:
                return list(value) if isinstance(value, list) else [value]
    return []


def _calling(calls: int) -> Message:
    """A turn that makes so many calls, for templates that answer calls only."""
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for i in range(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}
