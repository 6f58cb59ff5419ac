"""Tools from typed Python functions: the schema the policy sees, the check of its arguments, and the call.

The parameters `task`, `sandbox` and `number` are filled in by the framework and are no part of the schema.
Faults of a call are short `ToolError`s: they go back to the policy as the observation.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envs.base import ToolError
from envs.types import Task, ToolCall, ToolSpec
from sandbox.base import Sandbox

_INJECTED = ("task", "sandbox", "number")
_JSON_TYPES: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("string", (str,)),
    int: ("integer", (int,)),
    float: ("number", (int, float)),
    bool: ("boolean", (bool,)),
    list: ("array", (list,)),
    dict: ("object", (dict,)),
}


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function as a tool."""

    function: Callable[..., Any]
    spec: ToolSpec
    injected: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], *, stateless: bool) -> FunctionTool:
        """Reads a tool from a function's name, docstring and type hints.

        Raises:
            TypeError: A parameter has no hint, or one that JSON has no type for.
        """
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function)
        injected = tuple(name for name in parameters if name in _INJECTED)
        named = {name: p for name, p in parameters.items() if name not in _INJECTED}
        schema = {
            "type": "object",
            "properties": {name: {"type": _json_type(function, name, hints)[0]} for name in named},
            "required": [name for name, p in named.items() if p.default is p.empty],
            "additionalProperties": False,
        }
        spec = ToolSpec(function.__name__, inspect.getdoc(function) or "", schema, stateless)
        return cls(function, spec, injected)

    async def call(self, call: ToolCall, task: Task, sandbox: Sandbox | None) -> str:
        """Checks the arguments and runs the function.

        Raises:
            ToolError: The arguments are at fault, or the function says that the call is.
            ValueError: The tool needs something that the framework did not supply.
        """
        self._check(call.arguments)
        extra: dict[str, Any] = {"task": task, "sandbox": sandbox, "number": call.number}
        filled = {name: extra[name] for name in self.injected}
        absent = [name for name, value in filled.items() if value is None]
        if absent:
            raise ValueError(f"the tool {self.spec.name!r} was called without {', '.join(absent)}")
        result = self.function(**call.arguments, **filled)
        return str(await result if inspect.isawaitable(result) else result)

    def _check(self, arguments: Mapping[str, Any]) -> None:
        schema = self.spec.parameters
        for name in schema["required"]:
            if name not in arguments:
                raise ToolError(f"missing {name}")
        for name, value in arguments.items():
            if name not in schema["properties"]:
                raise ToolError(f"unknown {name}")
            kind = schema["properties"][name]["type"]
            allowed = next(types for json, types in _JSON_TYPES.values() if json == kind)
            if not isinstance(value, allowed) or (isinstance(value, bool) and kind != "boolean"):
                raise ToolError(f"{name} is no {kind}")


def _json_type(
    function: Callable[..., Any], name: str, hints: Mapping[str, Any]
) -> tuple[str, tuple[type, ...]]:
    hint = hints.get(name)
    kind = typing.get_origin(hint) or hint
    if kind not in _JSON_TYPES:
        raise TypeError(
            f"parameter {name!r} of the tool {function.__name__!r} has the hint {hint!r}; a tool's parameter "
            "is str, int, float, bool, list or dict (or `task`, `sandbox`, `number`, which are filled in)"
        )
    return _JSON_TYPES[kind]
