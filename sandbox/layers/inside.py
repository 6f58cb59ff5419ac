"""Paths inside a root that is not ours: links are followed as a process in it would, never out of it."""

from __future__ import annotations

import os
from pathlib import Path

from sandbox.errors import LayerError

_MAX_LINKS = 40


def inside(root: Path, path: str) -> str:
    """Returns a path of a root, relative to it, with no link in it; what is not there is taken as it is.

    Raises:
        LayerError: It goes round in circles.
    """
    left, done, links = path.split("/")[::-1], list[str](), 0
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            del done[-1:]
            continue
        full = root.joinpath(*done, name)
        if not full.is_symlink():
            done.append(name)
            continue
        links += 1
        if links > _MAX_LINKS:
            raise LayerError(f"{path!r} goes through too many links")
        target = os.readlink(full)
        done = [] if target.startswith("/") else done
        left += target.split("/")[::-1]
    return "/".join(done)
