"""Answers in the shape of OpenAI's chat completions, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from model.tokenizer import Tokenizer
from rl.serve.session import Answer, Choice


@dataclass(frozen=True, slots=True)
class Reply:
    """What all parts of one answer have in common."""

    model: str
    tokenizer: Tokenizer
    logprobs: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        choices = [
            {
                "index": index,
                "message": {**choice.message, "content": _content(choice)},
                "finish_reason": choice.finish,
                "logprobs": self._logprobs(choice),
            }
            for index, choice in enumerate(answer.choices)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": _usage(answer)}

    def chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        """A piece of a choice's message."""
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def ends(self, answer: Answer, *, usage: bool) -> Iterator[dict[str, Any]]:
        """The last pieces: why each choice ended, and what it cost."""
        head = self._head("chat.completion.chunk")
        for index, choice in enumerate(answer.choices):
            error = choice.message.get("parse_error")
            end = {
                "index": index,
                "delta": {"parse_error": error} if error else {},
                "finish_reason": choice.finish,
                "logprobs": self._logprobs(choice),
            }
            yield {**head, "choices": [end]}
        if usage:
            yield {**head, "choices": [], "usage": _usage(answer)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Every sampled token of the turn, tags and reasoning included, with its id."""
        if not self.logprobs:
            return None
        done = choice.completion
        content = []
        for token_id, logprob in zip(done.token_ids, done.logprobs, strict=True):
            text = self.tokenizer.decode([token_id])
            entry = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            content.append({**entry, "token_id": token_id})
        return {"content": content, "refusal": None}


def _content(choice: Choice) -> str | None:
    text = choice.message["content"]
    return None if not text and "tool_calls" in choice.message else text


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
