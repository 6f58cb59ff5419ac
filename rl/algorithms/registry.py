"""Finds an algorithm by its name or by an import path, and reads its settings off its signature.

The keyword-only parameters of a function are its settings. So an algorithm is one function and one line of
registration, a user's own is `module:function`, and a setting that no chosen function has can be refused.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class AlgorithmError(ValueError):
    """An algorithm's name, setting or result that cannot be used: what, why, and what to do."""


class Registry(Generic[F]):
    """Functions of one kind by name; also answers to `module:function`.

    Args:
        kind: what messages call them.
        takes: the argument they are given.
        also: further arguments that they get when they name them.
    """

    def __init__(self, kind: str, takes: str, also: Sequence[str] = ()) -> None:
        self.kind, self._takes, self._also = kind, takes, tuple(also)
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
            near = [known for known in self.names() if name and known.startswith(name)]
            near = near or difflib.get_close_matches(name, self._functions, 1)
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
                f"{self.kind} {path!r} cannot be imported: {error}; install the package, correct the "
                "path, or for a file in this folder set PYTHONPATH=."
            ) from error
        if not callable(function):
            raise AlgorithmError(f"{self.kind} {path!r} is no function but a {type(function).__name__}")
        self._check_signature(path, function)
        return function  # type: ignore[return-value]

    def _check_signature(self, path: str, function: Callable[..., Any]) -> None:
        """Refuses a function that could not be called the way those of this kind are."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            signature = None
        parameters = signature.parameters.values() if signature else ()
        given = [p for p in parameters if p.kind in _POSITIONAL]
        strange = [p for p in given[1:] if p.default is p.empty and p.name not in self._also]
        if not given or strange:
            also = f", and {' or '.join(self._also)} if it names them" if self._also else ""
            raise AlgorithmError(
                f"{self.kind} {path!r} has the arguments {signature or 'of no Python function'}; it is "
                f"called with ({self._takes}){also}, and its settings stand behind a `*`, as in "
                f"def mine({self._takes}, *, strength: float = 1.0)"
            )


def settings_of(function: Callable[..., Any]) -> dict[str, Any]:
    """An algorithm's settings and their defaults (`Parameter.empty`: none): its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
