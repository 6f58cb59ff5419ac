"""Finds an algorithm by its name or by an import path, and reads its settings off its signature.

The keyword-only parameters of a function are its settings. So an algorithm is one function and one line of
registration, a user's own is `module:function`, and a setting that no chosen function has can be refused.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class AlgorithmError(ValueError):
    """An algorithm's name, setting or result that cannot be used: what, why, and what to do."""


class Registry(Generic[F]):
    """Functions of one kind (`kind` is its name in messages) by name; also answers to `module:function`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Registers the decorated function under `name`; a name can be given once."""

        def add(function: F) -> F:
            if name in self._functions:
                raise AlgorithmError(
                    f"{self.kind} {name!r} is registered twice; give the second another name"
                )
            self._functions[name] = function
            return function

        return add

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._functions)

    def load(self, name: str) -> F:
        """Returns the function called `name`, or the one that the import path `module:function` names.

        Raises:
            AlgorithmError: The name is unknown, or the import path is broken.
        """
        if ":" in name:
            return self._import(name)
        if name not in self._functions:
            near = difflib.get_close_matches(name, self._functions, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise AlgorithmError(
                f"unknown {self.kind} {name!r}; {hint}There are {', '.join(self.names())}; "
                "your own is given as an import path, my_package.my_module:my_function"
            )
        return self._functions[name]

    def _import(self, path: str) -> F:
        module_name, _, function_name = path.partition(":")
        try:
            function = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError) as error:
            raise AlgorithmError(
                f"{self.kind} {path!r} cannot be imported: {error}; install the package or correct the path"
            ) from error
        if not callable(function):
            raise AlgorithmError(f"{self.kind} {path!r} is no function but a {type(function).__name__}")
        return function  # type: ignore[return-value]


def settings_of(function: Callable[..., Any]) -> dict[str, Any]:
    """An algorithm's settings and their defaults (`Parameter.empty`: none): its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
