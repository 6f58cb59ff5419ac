"""Versions of the protocol between client, front and node: N serves N - 1 and speaks it to who is behind.

Over HTTP each request names the version; on a node's socket the greeting does, and what is greeted without a
word of it is of version 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from sandbox.channel import Header
from sandbox.errors import PolicyError
from sandbox.types import SandboxSpec

API = 3
"""2: streams, processes, signals, full disks, snapshots. 3: specifications with more fields than the first
five, descriptions, and the operations that came with them."""

UNSAID = 2
"""The version of a node, or of its client, that does not say which."""

_SPEC_2 = frozenset({"image", "limits", "labels", "ttl_s", "journal"})
_LIMITS_2 = frozenset({"cpus", "memory_bytes", "pids", "tmpfs_bytes", "tmpfs_inodes", "open_files"})
_CAPABILITIES_2 = frozenset(
    {
        "images", "memory_limit", "process_limit", "cpu_limit", "inode_limit", "separate_users", "pause",
        "disk_snapshot", "memory_snapshot", "terminal",
    }
)  # fmt: skip
_NEW_IN_3 = frozenset({"describe", "claim", "denials", "warm", "hold_back", "top"})
_COMMANDS_OF_3 = frozenset({"move", "processes", "phase", "halt"})
_FIELDS_OF_3 = frozenset({"files", "at", "flow", "life_s"})


def served(said: object) -> int:
    """Returns the version that a caller speaks.

    Raises:
        PolicyError: It is not served here.
    """
    if str(said) not in (str(API - 1), str(API)):
        text = str(said)[:20]
        newer = text.isascii() and text.isdecimal() and int(text) > API
        raise PolicyError(
            f"this is version {API} of the interface and serves {API - 1} too, not {text!r}: "
            f"update {'this server' if newer else 'the caller'}"
        )
    return int(str(said))


def request_for(version: int, header: Header) -> Header:
    """Returns a request as a server of `version` understands it.

    Raises:
        PolicyError: It asks for what that version does not have.
    """
    if version >= API:
        return header
    if header.get("op") in _NEW_IN_3:
        raise PolicyError(f"the server is of version {version}, which has no {header['op']}: update it")
    if isinstance(header.get("command"), dict):
        command = cast("Header", header["command"])
        if new := sorted(_COMMANDS_OF_3 & {command.get("op")} | _FIELDS_OF_3 & command.keys()):
            raise PolicyError(f"the server is of version {version}, which has no {', '.join(new)}: update it")
    if not isinstance(header.get("spec"), dict):
        return header
    spec = cast("Mapping[str, Any]", header["spec"])
    plain: Mapping[str, Any] = asdict(SandboxSpec())
    limits = cast("Mapping[str, Any]", spec["limits"])
    asked = [name for name in spec if name not in _SPEC_2 and spec[name] != plain.get(name)]
    asked += [name for name in limits if name not in _LIMITS_2 and limits[name] != plain["limits"].get(name)]
    if asked:
        raise PolicyError(
            f"the server is of version {version}, without {', '.join(sorted(asked))}: update it"
        )
    known = {name: value for name, value in spec.items() if name in _SPEC_2}
    known["limits"] = {name: value for name, value in limits.items() if name in _LIMITS_2}
    return {**header, "spec": known}


def reply_for(version: int, reply: Header) -> Header:
    """Returns a reply as a caller of `version` understands it."""
    if version >= API or not isinstance(reply.get("capabilities"), dict):
        return reply
    held = cast("Header", reply["capabilities"])
    return {**reply, "capabilities": {name: held[name] for name in held if name in _CAPABILITIES_2}}
