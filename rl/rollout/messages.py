"""Between the records of environments and the plain dicts, shaped like the OpenAI API, of chat formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from envs.types import Message, Role, ToolCall, ToolSpec


def to_chat(message: Message) -> dict[str, Any]:
    """One message as a dict; fields without content are left out."""
    result: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [_call_to_chat(call) for call in message.tool_calls]
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    return result


def from_chat(message: Mapping[str, Any]) -> Message:
    """The assistant's message that a chat format parsed."""
    return Message(
        Role.ASSISTANT,
        message.get("content") or "",
        tuple(_call_from_chat(call) for call in message.get("tool_calls") or ()),
        reasoning=message.get("reasoning_content") or "",
    )


def tool_to_chat(tool: ToolSpec) -> dict[str, Any]:
    """One tool as a dict."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _call_to_chat(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_from_chat(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    return ToolCall(function["name"], json.loads(function["arguments"]), call.get("id", ""))
