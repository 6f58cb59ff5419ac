"""Messages and tools as they come in: checked, brought to one shape, and given an identity.

Two histories are the same as far as their messages have the same identity: role, content, calls with their
ids and arguments. Reasoning is not part of it, since most clients do not send it back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from model.chat.base import IMAGE_KINDS
from rl.serve.errors import ApiError

Message = dict[str, Any]
Messages = tuple[Message, ...]
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
_KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls", "reasoning_content", "reasoning", "parse_error"},
    "tool": {"role", "content", "tool_call_id", "name"},
}


def check_messages(messages: Any) -> Messages:
    """Returns the messages in one shape.

    Raises:
        ApiError: One of them is not understood.
    """
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages is a list of at least one message", param="messages", code="invalid_type")
    checked = tuple(_message(value, f"messages[{number}]") for number, value in enumerate(messages))
    if checked[-1]["role"] == "assistant":
        raise ApiError(
            "the last message is the assistant's own, and its text is not continued: end with another's",
            param="messages",
            code="invalid_value",
        )
    return checked


def check_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools.

    Raises:
        ApiError: One of them is no function with a name, or two have the same name.
    """
    if not isinstance(tools, list):
        raise ApiError("tools is a list", param="tools", code="invalid_type")
    names: set[str] = set()
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        where = f"tools[{number}]"
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise ApiError(
                f'{where} is {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}',
                param=where,
                code="invalid_type",
            )
        if not _is_schema(function.get("parameters")):
            raise ApiError(
                f"{where}.function.parameters is a JSON schema of type object",
                param=where,
                code="invalid_type",
            )
        if function.get("strict"):
            raise ApiError(
                f"{where}.function.strict is not supported: calls are not constrained; leave it out",
                param=where,
                code="unsupported_value",
            )
        if function["name"] in names:
            raise ApiError(f"{where} has the name of another tool", param=where, code="invalid_value")
        names.add(function["name"])
    return tuple(tools)


def _is_schema(schema: Any) -> bool:
    """Whether it is one as far as it is looked at: properties by name, and names that are required."""
    if schema is None:
        return True
    if not isinstance(schema, dict):
        return False
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    named = isinstance(properties, dict) and all(
        isinstance(value, dict | bool) for value in properties.values()
    )
    return named and isinstance(required, list) and all(isinstance(name, str) for name in required)


def identity(message: Message) -> bytes:
    """What makes two messages the same."""
    calls = [
        [call["id"], call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    content = message["content"] if isinstance(message["content"], str) else _parts(message["content"])
    what = [message["role"], content, calls, message.get("tool_call_id", "")]
    return hashlib.blake2b(
        json.dumps(what, sort_keys=True).encode(errors="surrogatepass"), digest_size=16
    ).digest()


def reasoning_of(message: Message) -> str | None:
    """The reasoning that came with a message; None when its sender left it out."""
    return message.get("reasoning_content")


def in_order(messages: Sequence[Message], calls: Sequence[str]) -> list[Message]:
    """Returns messages with the tool results among them in the order of the calls that they answer."""
    places = [i for i, message in enumerate(messages) if message.get("tool_call_id") in calls]
    results = sorted((messages[i] for i in places), key=lambda message: calls.index(message["tool_call_id"]))
    ordered = list(messages)
    for place, message in zip(places, results, strict=True):
        ordered[place] = message
    return ordered


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ApiError(f"{where} is an object", param=where, code="invalid_type")
    role = _ROLES.get(value.get("role", "")) if isinstance(value.get("role"), str) else None
    if role is None:
        raise ApiError(
            f"{where}.role is one of {', '.join(_ROLES)}", param=f"{where}.role", code="invalid_value"
        )
    unknown = sorted(
        name for name, held in value.items() if name not in _KEYS[role] and held not in (None, [], "")
    )
    if unknown:
        raise ApiError(
            f"{where}.{unknown[0]} is not supported in a message of {role}: leave it out",
            param=f"{where}.{unknown[0]}",
            code="unknown_parameter",
        )
    message: Message = {"role": role, "content": _content(value.get("content"), role, f"{where}.content")}
    if role == "tool":
        message["tool_call_id"] = _text(value.get("tool_call_id"), f"{where}.tool_call_id")
    if role == "assistant":
        message |= _spoken(value, where)
    return message


def _spoken(value: Mapping[str, Any], where: str) -> Message:
    """Reasoning and calls of an assistant's message."""
    result: Message = {}
    reasoning = value.get("reasoning_content", value.get("reasoning"))
    if reasoning is not None:
        result["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ApiError(f"{where}.tool_calls is a list", param=f"{where}.tool_calls", code="invalid_type")
    if calls:
        result["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ApiError(f"{where} is a call of a function", param=where, code="invalid_type")
    arguments = _text(function.get("arguments"), f"{where}.function.arguments")
    if not isinstance(_arguments(arguments), dict):
        raise ApiError(
            f"{where}.function.arguments is a JSON object, as a text", param=where, code="invalid_value"
        )
    name = _text(function.get("name"), f"{where}.function.name")
    named = {"name": name, "arguments": arguments}
    return {"id": _text(call.get("id"), f"{where}.id"), "type": "function", "function": named}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _content(content: Any, role: str, where: str) -> str | list[Message]:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where} is a text or a list of parts", param=where, code="invalid_type")
    parts = [_part(part, role, f"{where}[{number}]") for number, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, role: str, where: str) -> Message:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url" and role in ("user", "tool"):
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if isinstance(url, str) and url.startswith("data:"):
            return {"type": "image_url", "image_url": {"url": url}}
        raise ApiError(
            f"{where}.image_url.url is a data:image/...;base64 URL: nothing is fetched from the network",
            param=where,
            code="invalid_image_url",
        )
    raise ApiError(
        f"{where} is a part of type text{', or image_url' if role in ('user', 'tool') else ''}",
        param=where,
        code="unsupported_value",
    )


def _parts(parts: Sequence[Message]) -> list[str]:
    """Parts with images by their digest."""
    return [
        hashlib.sha256(part["image_url"]["url"].encode()).hexdigest()
        if part["type"] in IMAGE_KINDS
        else part["text"]
        for part in parts
    ]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ApiError(f"{where} is a text", param=where, code="invalid_type")
    return value
