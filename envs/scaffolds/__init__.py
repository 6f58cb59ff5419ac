"""Scaffolds: how a policy is put to work.

`chat` lets it speak once, `tools` lets it call tools in a loop, `external` gives it to an agent program.
Others are found by entry point group `tempering.scaffolds` or by import path.
"""

from __future__ import annotations

from typing import Any, cast

from envs.base import Scaffold
from envs.plugins import BrokenPluginError, Catalogue, check_options

SCAFFOLDS = Catalogue(
    kind="scaffold",
    group="tempering.scaffolds",
    builtins={
        "chat": "envs.scaffolds.chat:Chat",
        "tools": "envs.scaffolds.tools:Tools",
        "external": "envs.scaffolds.external:External",
    },
)


def load(name: str, **options: Any) -> Scaffold:
    """Builds a scaffold by name, entry point or import path.

    Raises:
        PluginError: Unknown, double or broken name, or unknown option; see `envs.plugins`.
    """
    factory = SCAFFOLDS.resolve(name)
    check_options(f"scaffold {name!r}", factory, options)
    scaffold = factory(**options)
    if not isinstance(getattr(scaffold, "name", None), str) or not callable(getattr(scaffold, "run", None)):
        raise BrokenPluginError(
            f"scaffold {name!r} built a {type(scaffold).__name__} that lacks `name` or `run`; "
            "see envs.base.Scaffold"
        )
    return cast(Scaffold, scaffold)


def list_scaffolds() -> dict[str, str]:
    """Returns the known names with the import paths they come from."""
    return SCAFFOLDS.names()
