"""Checks a chat encoding against reference cases: exact prompt strings and parsed turns.

The format of the cases: `templates` and `special` (the wording), `prompts` (messages and options with the
exact string) and `completions` (a rendered turn with the turn it was made from).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from model.chat.base import arguments_of
from model.chat.deepseek import DeepSeekWording, render_text
from model.chat.deepseek_parse import parse_text


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One reference case: whether we agree, and what differs."""

    name: str
    passed: bool
    detail: str = ""


def wording_of(data: Mapping[str, Any]) -> DeepSeekWording:
    """Returns the wording that the cases were made with."""
    names = dict(data["effort_names"])
    default = data["default_effort"]
    return DeepSeekWording(
        tools_section=data["templates"]["tools_section"],
        effort_line=data["templates"]["effort_line"],
        effort_names=names,
        default_effort=names[default] if isinstance(default, str) else default,
        **data["special"],
    )


def check_cases(data: Mapping[str, Any]) -> Iterator[CaseResult]:
    """Checks every prompt and every completion of `data` (the content of a `chat.json`)."""
    wording = wording_of(data)
    for case in data["prompts"]:
        yield _check_prompt(case, wording)
    for case in data["completions"]:
        yield _check_completion(case, wording)


def _check_prompt(case: Mapping[str, Any], wording: DeepSeekWording) -> CaseResult:
    text = render_text(
        case["messages"],
        wording,
        thinking=case["thinking_mode"] == "thinking",
        effort=case["reasoning_effort"],
        drop_reasoning=case["drop_thinking"],
    )
    name, want = f"prompt: {case['name']}", case["prompt"]
    if text == want:
        return CaseResult(name, True)
    at = next(
        (i for i, (a, b) in enumerate(zip(text, want, strict=False)) if a != b), min(len(text), len(want))
    )
    return CaseResult(name, False, f"differs at {at}: {text[at : at + 40]!r}, not {want[at : at + 40]!r}")


def _check_completion(case: Mapping[str, Any], wording: DeepSeekWording) -> CaseResult:
    turn = parse_text(case["completion"], wording, thinking=case["thinking_mode"] == "thinking")
    calls = [
        {"name": call["function"]["name"], "arguments": arguments_of(call)}
        for call in turn.message.get("tool_calls", ())
    ]
    got = (turn.message.get("reasoning_content", ""), turn.message["content"], calls, turn.parse_error)
    parsed = case["parsed"]
    want = (parsed["reasoning"] or "", parsed["content"], list(parsed["tool_calls"]), "")
    return CaseResult(
        f"completion: {case['name']}", got == want, "" if got == want else f"{got} is not {want}"
    )
