"""The list of a fleet's nodes: a file with a line for each, which fronts follow."""

from __future__ import annotations

from pathlib import Path

from sandbox.errors import PolicyError


def read_nodes(path: Path) -> dict[str, str]:
    """Returns the addresses of the nodes by name, from lines `name url`; `#` begins a comment.

    Raises:
        PolicyError: It cannot be read, or says something else.
    """
    found: dict[str, str] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise PolicyError(f"the list of nodes {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words and (len(words) != 2 or words[0] in found or "." in words[0]):
            raise PolicyError(f"{path}, line {number}: a line is `name http(s)://host:port`, each name once")
        found |= {words[0]: words[1].rstrip("/")} if words else {}
    return found


def changed(path: Path) -> int:
    """Returns what differs once the list has been written again.

    Raises:
        PolicyError: It cannot be read.
    """
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise PolicyError(f"the list of nodes {path} cannot be read: {error.strerror}") from error
