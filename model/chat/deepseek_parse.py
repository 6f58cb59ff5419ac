"""Parsing of the published chat encoding.

It never raises: what cannot be read is said in words for the policy. A call counts only in a turn that has
its end token: a turn cut by the token limit has no calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from model.chat.base import ParsedTurn, Tool, check_call, strict_json, tool_call

if TYPE_CHECKING:
    from model.chat.deepseek import DeepSeekWording


class _Unreadable(Exception):
    """A turn outside the grammar; its text goes to the policy."""


def parse_text(
    text: str, wording: DeepSeekWording, *, thinking: bool, tools: Sequence[Tool] = ()
) -> ParsedTurn:
    """Reads a turn from its text, which begins after the assistant's header.

    Args:
        text: What was sampled, with the end token when it was sampled.
        wording: The special strings.
        thinking: Whether the header opened the reasoning. Text that opens it itself is read as such.
        tools: When given, names and required arguments of calls are checked against them.

    Returns:
        The turn. Reasoning that was never closed leaves the content empty.
    """
    body, end, after = text.partition(wording.eos)
    truncated = not end
    opened = thinking or body.startswith(wording.think)
    reasoning, closed, rest = body.removeprefix(wording.think).partition(wording.think_end)
    if not closed:
        reasoning, rest = (reasoning, "") if opened else ("", body)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    try:
        if after:
            raise _Unreadable("there is text after the end of the turn")
        if opened and not closed:
            raise _Unreadable(f"the reasoning was not closed: end it with {wording.think_end}")
        content, calls = _split_calls(rest, wording.dsml, truncated)
        message["content"] = content
        parsed = [_check(call, tools) for call in calls]
    except _Unreadable as error:
        return ParsedTurn(message, str(error), truncated)
    if parsed:
        message["tool_calls"] = parsed
    return ParsedTurn(message, "", truncated)


def _split_calls(text: str, dsml: str, truncated: bool) -> tuple[str, list[tuple[str, dict[str, Any], int]]]:
    """Splits content from the block of calls; each call is name, arguments, index."""
    content, opened, block = text.partition(f"<{dsml} calls>")
    if not opened:
        if dsml in text:
            raise _Unreadable(f"a tool call stands outside <{dsml} calls>: put it inside")
        return text, []
    if truncated:
        raise _Unreadable("the turn was cut by the token limit inside a tool call: nothing was run")
    calls, closed, after = block.partition(f"</{dsml} calls>")
    if not closed:
        raise _Unreadable(f"the tool calls were not closed: end them with </{dsml} calls>")
    if after.strip():
        raise _Unreadable("there is text after the tool calls: put it before them")
    return content.removesuffix("\n\n"), _read_calls(calls, dsml)


def _read_calls(block: str, dsml: str) -> list[tuple[str, dict[str, Any], int]]:
    tag = re.escape(dsml)
    head = re.compile(rf'\s*<{tag} invoke name="([^"\n]*)">\n?')
    parameter = re.compile(
        rf'\s*<{tag} parameter name="([^"\n]*)" string="(true|false)">(.*?)</{tag} parameter>\n?', re.DOTALL
    )
    tail = re.compile(rf"\s*</{tag} invoke>\n?")
    calls: list[tuple[str, dict[str, Any], int]] = []
    position = 0
    while block[position:].strip():
        if not (found := head.match(block, position)):
            raise _Unreadable(f'expected <{dsml} invoke name="..."> in call {len(calls) + 1}')
        name, position, arguments = found[1], found.end(), {}
        while found := parameter.match(block, position):
            key, kind, value = found.groups()
            if key in arguments:
                raise _Unreadable(f"parameter {key} of {name} is given twice")
            arguments[key] = value if kind == "true" else _json(value, key)
            position = found.end()
        if not (found := tail.match(block, position)):
            raise _Unreadable(f"call {name} is malformed after {len(arguments)} parameters")
        position = found.end()
        calls.append((name, arguments, len(calls)))
    if not calls:
        raise _Unreadable("the block of tool calls is empty")
    return calls


def _json(text: str, key: str) -> Any:
    try:
        return strict_json(text)
    except ValueError as error:
        raise _Unreadable(
            f'parameter {key} is not valid JSON ({error}): write JSON, or use string="true"'
        ) from error


def _check(call: tuple[str, dict[str, Any], int], tools: Sequence[Tool]) -> dict[str, Any]:
    name, arguments, index = call
    if tools and (problem := check_call(name, arguments, tools)):
        raise _Unreadable(problem)
    try:
        return tool_call(name, arguments, index)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"the arguments of {name} are not valid JSON ({error})") from error
