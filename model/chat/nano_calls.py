"""Tool calls of the small presets: what stands between the tags of a call, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from model.chat.base import Tool, arguments_of, check_call, function_of, strict_json, tool_call


class Unreadable(Exception):
    """A turn outside the grammar; its text goes to the policy, so it is short and in small letters."""


def only_string_parameter(tool: Tool) -> str | None:
    """Returns the name of the only parameter of a tool when it is a string, else None."""
    properties = (function_of(tool).get("parameters") or {}).get("properties") or {}
    if len(properties) == 1:
        name, schema = next(iter(properties.items()))
        return name if isinstance(schema, Mapping) and schema.get("type") == "string" else None
    return None


def call_body(call: Mapping[str, Any], tools: Sequence[Tool]) -> str:
    """Returns what stands between the tags of a call: its only string argument as it is, or JSON."""
    arguments = arguments_of(call)
    if tools:
        bare = len(tools) == 1 and only_string_parameter(tools[0]) is not None
    else:
        bare = len(arguments) == 1 and isinstance(next(iter(arguments.values())), str)
    if bare:
        return str(next(iter(arguments.values())))
    return json.dumps({"name": function_of(call)["name"], "arguments": arguments}, ensure_ascii=False)


def read_call(body: str, tools: Sequence[Tool], index: int) -> dict[str, Any]:
    """Reads what stands between the tags of call `index`. Raises Unreadable."""
    if not tools:
        raise Unreadable("there is no tool here")
    if not body:
        raise Unreadable("empty call")
    parameter = only_string_parameter(tools[0]) if len(tools) == 1 else None
    if parameter is not None:
        return tool_call(str(function_of(tools[0])["name"]), {parameter: body}, index)
    try:
        value = strict_json(body)
        name, arguments = value["name"], value["arguments"]
        if not isinstance(name, str) or not isinstance(arguments, dict) or len(value) != 2:
            raise TypeError
        if problem := check_call(name, arguments, tools):
            raise Unreadable(problem)
        return tool_call(name, arguments, index)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Unreadable("call is not json with name and arguments") from error
