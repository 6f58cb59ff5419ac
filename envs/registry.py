"""The registry of environments: `@env` puts one in, `load` takes one out by name, entry point or path."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from envs.base import Environment
from envs.definition import Definition, TaskFunction
from envs.plugins import BrokenPluginError, Catalogue, UnknownNameError, check_options, origin_of
from sandbox.types import SandboxSpec

ENVIRONMENTS = Catalogue(
    kind="environment",
    group="tempering.envs",
    builtins={
        "calc": "envs.calc:calc",
        "probe": "envs.probe:probe",
        "reasoning_gym": "envs.adapters.reasoning_gym:ReasoningGym",
        "recall": "envs.recall:recall",
        "sort": "envs.sort:sort",
    },
)
_MEMBERS = ("name", "splits", "tools", "sandbox", "max_turns", "reward_name", "efforts")
_METHODS = ("tasks", "demonstrations", "setup", "cleanup", "call_tool", "score")


def env(
    name: str,
    *,
    splits: tuple[str, ...] = ("train", "eval"),
    max_turns: int | None = None,
    reward: str = "",
    efforts: tuple[int, ...] = (50,),
    sandbox: SandboxSpec | None = None,
) -> Callable[[TaskFunction], Definition]:
    """Makes a generator of tasks an environment, and registers it.

    The generator takes `split` and `seed` first; its further parameters are the environment's options. The
    default of `max_turns` is 1 without tools and 8 with them; `reward` names a reward of the library; a
    `sandbox` is implied by a tool that takes one.

    Raises:
        DuplicateNameError: Another environment is registered under this name.
        ValueError: A declaration that makes no sense.
    """

    def add(function: TaskFunction) -> Definition:
        if list(inspect.signature(function).parameters)[:2] != ["split", "seed"]:
            raise ValueError(
                f"the task generator of environment {name!r} must take `split, seed` as its first parameters"
            )
        definition = Definition(
            name,
            function,
            splits=splits,
            max_turns=max_turns,
            reward=reward,
            efforts=efforts,
            sandbox=sandbox,
        )
        ENVIRONMENTS.register(name, origin_of(function), definition)
        return definition

    return add


def load(name: str, **options: Any) -> Environment:
    """Builds an environment.

    Args:
        name: A built-in or registered name, the name of an entry point of group `tempering.envs`, an import
            path `package.module:attribute`, a file `path/to/file.py`, or `path/to/file.py:name`.
        options: What the environment's generator (or class) takes.

    Raises:
        PluginError: Unknown, double or broken name, or unknown option; see `envs.plugins`.
    """
    return build(name, resolve(name), options)


def resolve(name: str) -> Any:
    """Returns the definition, class or factory that `load` would build from."""
    path, _, attribute = name.partition(".py:")
    if attribute or name.endswith(".py"):
        file = Path(f"{path}.py" if attribute else name)
        return _from_module(ENVIRONMENTS.load_file(file), file, attribute)
    return ENVIRONMENTS.resolve(name)


def list_environments() -> dict[str, str]:
    """Returns the known names with the import paths they come from."""
    return ENVIRONMENTS.names()


def build(name: str, factory: Any, options: dict[str, Any]) -> Environment:
    """Calls a definition, class or factory with options, and checks what it returns.

    Raises:
        BrokenPluginError: It failed, or what it returned is no environment.
        UnknownOptionError: It takes no such option.
    """
    if not callable(factory):
        raise BrokenPluginError(
            f"environment {name!r} leads to {factory!r}; it must be what `@env` returns, or a class"
        )
    if isinstance(factory, Definition):
        return factory(**options)
    check_options(f"environment {name!r}", factory, options)
    try:
        built = factory(**options)
    except ImportError as error:
        raise BrokenPluginError(f"environment {name!r} cannot be built: {error}") from error
    lacking = [member for member in (*_MEMBERS, *_METHODS) if not hasattr(built, member)]
    if lacking:
        raise BrokenPluginError(
            f"environment {name!r} built a {type(built).__name__} that lacks {', '.join(lacking)}; "
            "see envs.base.Environment"
        )
    return cast(Environment, built)


def _from_module(module: ModuleType, file: Path, attribute: str) -> Any:
    """Finds the environment of a file: the named one, or the only one."""
    found: dict[str, Any] = {}
    for key, value in vars(module).items():
        local_class = isinstance(value, type) and value.__module__ == module.__name__
        if isinstance(value, Definition) and value.function.__module__ == module.__name__:
            found[value.name] = value
        elif local_class and all(hasattr(value, method) for method in _METHODS):
            found[str(getattr(value, "name", key))] = value
    wanted = getattr(module, attribute, None) if attribute else None
    if attribute and (attribute in found or wanted in found.values()):
        return found.get(attribute, wanted)
    if not attribute and len(found) == 1:
        return next(iter(found.values()))
    near = get_close_matches(attribute, found, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    what = f"no environment {attribute!r}" if attribute else f"{len(found)} environments, not one"
    raise UnknownNameError(
        f"{file} has {what}.{hint} It has: {', '.join(sorted(found)) or 'none'}. "
        f"Name one as {file}:NAME, or decorate a task generator with `@env`."
    )
