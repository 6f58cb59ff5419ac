"""Keeps other people's `model.py` out: all our top-level packages must come from one folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("conf", "envs", "model", "rewards", "rl", "sandbox")


class ForeignPackageError(ImportError):
    """One of our packages is found somewhere else: which, where, and what to do."""


def check_roots(packages: Sequence[str] = PACKAGES) -> Path:
    """Returns the folder that all our packages come from.

    Raises:
        ForeignPackageError: A package is missing, or is taken from another place.
    """
    own = Path(__file__).resolve().parents[2]
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            place = next(iter(spec.submodule_search_locations or [""]), "") if spec else ""
            found = f"is only a folder without __init__.py ({place})" if place else "is not there"
            raise ForeignPackageError(f"package {name!r} {found}; install Tempering again: pip install -e .")
        origin = Path(spec.origin).resolve()
        if origin != own / name / "__init__.py":
            raise ForeignPackageError(
                f"`import {name}` finds {origin}, not Tempering's own in {own / name}; rename that file, "
                "start `temper` from another folder, or set PYTHONSAFEPATH=1"
            )
    return own
