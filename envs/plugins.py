"""Finding what users extend (environments, scaffolds, rewards) by name, entry point, import path or file.

One catalogue serves one kind of thing. A name is looked up among the built-ins, what a decorator registered,
and the entry points of installed packages; `package.module:attribute` and `path/to/file.py` need no
registration at all. Every error is a `PluginError` that says what, why and the next step:

- `UnknownNameError`: nothing has this name
- `DuplicateNameError`: two different things have it
- `BrokenPluginError`: it was found and its import failed (the cause is chained)
- `UnknownOptionError`: an option that the thing does not take
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

_FILE_PREFIX = "tempering_file_"


class PluginError(ValueError):
    """Something a user named cannot be had: what, why, and the next step."""


class UnknownNameError(PluginError):
    """Nothing has this name."""


class DuplicateNameError(PluginError):
    """Two different things have the same name."""


class BrokenPluginError(PluginError):
    """A thing was found, and importing or building it failed."""


class UnknownOptionError(PluginError):
    """An option that is not taken."""


@dataclass(slots=True)
class Catalogue:
    """All things of one kind that can be named.

    `builtins` maps names to import paths (`package.module:attribute`); `registered` maps names to what a
    decorator registered, with its import path.
    """

    kind: str
    group: str
    builtins: Mapping[str, str]
    registered: dict[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])

    def register(self, name: str, origin: str, value: Any) -> None:
        """Registers a decorated thing; the same origin may register again (a reload).

        Raises:
            DuplicateNameError: Another origin has this name.
        """
        known = self.registered[name][0] if name in self.registered else self.builtins.get(name, origin)
        if known != origin:
            raise self._duplicate(name, [known, origin])
        self.registered[name] = (origin, value)

    def names(self) -> dict[str, str]:
        """Returns every known name with the import paths it comes from."""
        found: dict[str, list[str]] = {name: [path] for name, path in self.builtins.items()}
        for point in self._points():
            found.setdefault(point.name, []).append(point.value)
        for name, (origin, _) in self.registered.items():
            found.setdefault(name, []).append(origin)
        return {name: ", ".join(dict.fromkeys(paths)) for name, paths in sorted(found.items())}

    def resolve(self, name: str) -> Any:
        """Returns what has this name or import path.

        Raises:
            UnknownNameError: Nothing has this name.
            DuplicateNameError: Two different things have it.
            BrokenPluginError: Its import failed.
        """
        found = self._candidates(name)
        if not found and ":" in name:
            return self.import_path(name)
        if not found:
            raise self._unknown(name)
        values = [(origin, load()) for origin, load in found.items()]
        if any(value is not values[0][1] for _, value in values):
            raise self._duplicate(name, [origin for origin, _ in values])
        return values[0][1]

    def import_path(self, path: str) -> Any:
        """Returns what `package.module:attribute` names.

        Raises:
            BrokenPluginError: The module cannot be imported, or has no such attribute.
        """
        module_name, _, attribute = path.partition(":")
        try:
            value: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                value = getattr(value, part)
        except Exception as error:
            raise BrokenPluginError(
                f"{self.kind} {path!r} cannot be imported: {type(error).__name__}: {error}. "
                f"Try `python -c 'import {module_name}'` in the same environment, and repair that first."
            ) from error
        return value

    def load_file(self, path: Path) -> ModuleType:
        """Runs a Python file as a module of its own.

        Raises:
            UnknownNameError: There is no such file.
            BrokenPluginError: Running it failed.
        """
        if not path.is_file():
            raise UnknownNameError(
                f"there is no file {path} ({path.absolute()}); check the path of the {self.kind}"
            )
        try:
            return load_module(path)
        except PluginError:
            raise
        except Exception as error:
            raise BrokenPluginError(
                f"{self.kind} file {path} cannot be run: {type(error).__name__}: {error}. "
                f"Try `python {path}`, and repair that first."
            ) from error

    def _points(self) -> Iterable[EntryPoint]:
        return entry_points(group=self.group)

    def _candidates(self, name: str) -> dict[str, Callable[[], Any]]:
        """Returns the origins of a name, each with what loads it."""
        found: dict[str, Callable[[], Any]] = {}
        paths = [self.builtins[name]] if name in self.builtins else []
        paths += [point.value for point in self._points() if point.name == name]
        for path in paths:
            found[path] = lambda path=path: self.import_path(path)
        if name in self.registered:
            origin, value = self.registered[name]
            found[origin] = lambda: value
        return found

    def _unknown(self, name: str) -> UnknownNameError:
        names = self.names()
        near = get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return UnknownNameError(
            f"there is no {self.kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}. "
            f"Install the package that offers it (entry point group {self.group!r}), or name it by import "
            "path (package.module:attribute)."
        )

    def _duplicate(self, name: str, origins: list[str]) -> DuplicateNameError:
        return DuplicateNameError(
            f"{self.kind} {name!r} comes from {' and from '.join(origins)}; rename one, uninstall one, "
            "or name the one you mean by its import path (package.module:attribute)."
        )


def origin_of(function: Callable[..., Any]) -> str:
    """Returns where a function stands: its import path, or its file when it was loaded from one."""
    module = function.__module__
    if module.startswith(_FILE_PREFIX):
        module = inspect.getsourcefile(function) or module
    return f"{module}:{function.__qualname__}"


def load_module(path: Path) -> ModuleType:
    """Runs a Python file as a module named after its path; running it again replaces the module."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"{_FILE_PREFIX}{digest}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_options(
    what: str, factory: Callable[..., Any], options: Mapping[str, Any], *, hidden: int = 0
) -> None:
    """Checks options against the parameters of `factory`, of which the first `hidden` are no options.

    Raises:
        UnknownOptionError: One is not taken, or a required one is missing.
    """
    parameters = list(inspect.signature(factory).parameters.values())[hidden:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    for name in options:
        if name not in known and not takes_any:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            listed = ", ".join(sorted(known)) or "none"
            raise UnknownOptionError(f"{what} has no option {name!r}.{hint} Its options: {listed}.")
    missing = [
        p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in options
    ]
    if missing:
        raise UnknownOptionError(
            f"{what} needs the option {', '.join(missing)}; give it in the configuration."
        )
