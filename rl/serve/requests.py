"""From a JSON body to a checked request: what is not understood is refused, never passed over.

A parameter is known (it does something), neutral (it may have its one value that changes nothing, as
`frequency_penalty: 0`), or free (it says nothing about the answer, as `user`). Everything else is an error.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.serve.errors import ApiError
from rl.serve.messages import Messages, check_messages, check_tools

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
EFFORTS = {"low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100}
"""OpenAI's `reasoning_effort` on our scale."""
MOST_CHOICES, MOST_STOPS = 64, 4
_FREE = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "store": (False,),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
}
_KNOWN = {
    "model", "messages", "tools", "tool_choice", "n", "seed", "temperature", "top_p", "top_k", "max_tokens",
    "max_completion_tokens", "stop", "logprobs", "stream", "stream_options", "reasoning_effort", "effort",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for chat completions. None stands for what the caller left to the server."""

    model: str
    messages: Messages
    tools: tuple[Mapping[str, Any], ...]
    n: int = 1
    effort: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False


def parse_body(data: bytes) -> dict[str, Any]:
    """Reads a body as a JSON object.

    Raises:
        ApiError: It is something else.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({error}): send a JSON object", code="invalid_json") from error
    if _has_surrogate(data, body):
        raise ApiError("the body holds half of a character (a lone surrogate)", code="invalid_json")
    if not isinstance(body, dict):
        raise ApiError("the body is a JSON object with model and messages", code="invalid_json")
    return {name: value for name, value in body.items() if value is not None}


def _has_surrogate(data: bytes, body: Any) -> bool:
    """Whether a text has a character that no encoding knows; JSON can only spell it as an escape."""
    if not _SURROGATE.search(data):
        return False
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Checks a body without nulls and returns the request.

    Raises:
        ApiError: Something is missing, wrong, or not understood.
    """
    for name in body:
        _check_known(name, body[name])
    for name in ("model", "messages"):
        if name not in body:
            raise ApiError(f"{name} is missing", param=name, code="missing_required_parameter")
    if not isinstance(body["model"], str):
        raise ApiError("model is a text", param="model", code="invalid_type")
    stream = _truth(body, "stream")
    return ChatRequest(
        model=body["model"],
        messages=check_messages(body["messages"]),
        tools=_tools(body),
        n=_whole(body, "n", 1, MOST_CHOICES) or 1,
        effort=_effort(body),
        seed=_whole(body, "seed", -(2**63), 2**63 - 1),
        temperature=_number(body, "temperature", 0.0, 100.0),
        top_p=_number(body, "top_p", 1e-9, 1.0),
        top_k=_whole(body, "top_k", 0, 2**31) or 0,
        max_tokens=_max_tokens(body),
        stops=_stops(body),
        logprobs=_truth(body, "logprobs"),
        stream=stream,
        include_usage=_include_usage(body, stream),
    )


def _check_known(name: str, value: Any) -> None:
    if name in _KNOWN or name in _FREE:
        return
    if name in _NEUTRAL:
        if not any(
            (value == neutral and type(value) is not bool) or value is neutral for neutral in _NEUTRAL[name]
        ):
            only = " or ".join(json.dumps(neutral) for neutral in _NEUTRAL[name])
            raise ApiError(
                f"{name} is not supported here: leave it out, or give {only}",
                param=name,
                code="unsupported_parameter",
            )
        return
    near = difflib.get_close_matches(name, sorted(_KNOWN), n=1)
    hint = f"; did you mean {near[0]}?" if near else ": leave it out"
    raise ApiError(f"there is no parameter {name[:80]!r}{hint}", param=name[:80], code="unknown_parameter")


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = check_tools(body.get("tools", []))
    choice = body.get("tool_choice", "auto")
    if choice == "auto":
        return tools
    if choice == "none":
        return ()
    raise ApiError(
        f"tool_choice {json.dumps(choice)[:80]} is not supported: a model is not made to call a tool here; "
        'take "auto" or "none"',
        param="tool_choice",
        code="unsupported_value",
    )


def _effort(body: Mapping[str, Any]) -> int | None:
    if "effort" in body and "reasoning_effort" in body:
        raise ApiError("effort and reasoning_effort say the same: give one", param="effort")
    if "reasoning_effort" in body:
        name = body["reasoning_effort"]
        if not isinstance(name, str) or name not in EFFORTS:
            known = ", ".join(EFFORTS)
            raise ApiError(
                f"reasoning_effort is one of {known}; effort takes a number from 1 to 100",
                param="reasoning_effort",
                code="invalid_value",
            )
        return EFFORTS[name]
    return _whole(body, "effort", 1, 100)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
    if len(names) > 1:
        raise ApiError("max_tokens and max_completion_tokens say the same: give one", param="max_tokens")
    return _whole(body, names[0], 1, 2**31) if names else None


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(
            "stop is a text or a list of texts, none of them empty", param="stop", code="invalid_type"
        )
    if len(stops) > MOST_STOPS:
        raise ApiError(f"stop takes at most {MOST_STOPS} texts", param="stop", code="invalid_value")
    return tuple(stops)


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise ApiError("stream_options is an object", param="stream_options", code="invalid_type")
    if options and not stream:
        raise ApiError("stream_options belongs to stream: true", param="stream_options")
    unknown = sorted(options.keys() - {"include_usage", "include_obfuscation"})
    if unknown:
        raise ApiError(
            f"stream_options has no {unknown[0]!r}", param="stream_options", code="unknown_parameter"
        )
    return _truth(options, "include_usage")


def _truth(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(f"{name} is true or false", param=name, code="invalid_type")
    return value


def _whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ApiError(f"{name} is an integer from {low} to {high}", param=name, code="invalid_value")
    return value


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value = body.get(name, 1.0)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not low <= value <= high:
        raise ApiError(f"{name} is a number from {low:g} to {high:g}", param=name, code="invalid_value")
    return float(value)
