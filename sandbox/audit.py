"""The audit log: one JSON line for every call, of who asked what of which sandbox and what came of it.

Commands and files are not in it, only the digest by which a sandbox's journal knows a command.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

from sandbox.channel import Header
from sandbox.errors import RefusedError, SandboxError
from sandbox.journal import digest

_LOG = logging.getLogger("sandbox.audit")
_MOST = 1000
_ASKED = ("box", "boxes", "snapshot", "key", "count", "replay", "ttl_s", "node", "nodes")


class Audit:
    """Appends lines to a file of mode 0600, or to standard error; a file that was rotated is opened anew."""

    def __init__(self, path: Path | None = None):
        self._path, self._fd, self._inode = path, -1, -1

    def write(self, **fields: Any) -> None:
        """Appends one line, whole, with the time; what cannot be written is told of, and hinders no call."""
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"
        line = json.dumps({"time": stamp, **fields}, separators=(",", ":")).encode() + b"\n"
        try:
            if os.write(self._file(), line) < len(line):
                self.close()
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError as error:
            _LOG.error("the audit log %s cannot be written: %s", self._path, error.strerror)

    def _file(self) -> int:
        if self._path is None:
            return sys.stderr.fileno()
        if self._fd < 0 or not self._path.exists() or self._path.stat().st_ino != self._inode:
            self.close()
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            about = os.fstat(self._fd)
            self._inode = about.st_ino
            if about.st_size and os.pread(self._fd, 1, about.st_size - 1) != b"\n":
                os.write(self._fd, b"\n")  # a full disk or a loss of power cut the last line off
        return self._fd

    def close(self) -> None:
        """Lets go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def owner_of(header: Header) -> str:
    """Returns for whom a call says that it is."""
    client = header.get("client")
    owner = cast("Header", client).get("owner", "") if isinstance(client, dict) else header.get("owner", "")
    return str(owner)[:_MOST]


def _short(value: Any) -> Any:
    """Returns what a caller said, cut where it is too long for a line of a log."""
    text = value if isinstance(value, str) else json.dumps(value)
    return value if len(text) <= _MOST else text[:_MOST] + "..."


def asked(header: Header, body: bytes) -> dict[str, Any]:
    """Returns what a call says it wants, as far as it belongs into the log."""
    fields = {name: _short(header[name]) for name in _ASKED if header.get(name)}
    if isinstance(header.get("command"), dict):
        command = cast("Header", header["command"])
        fields |= {"command": _short(command.get("op")), "digest": digest(command, body)}
    if isinstance(header.get("spec"), dict):
        spec = cast("Header", header["spec"])
        about = {"backend": header.get("backend"), "image": spec.get("image"), "limits": spec.get("limits")}
        fields |= {name: _short(value) for name, value in about.items()}
    return {**fields, "bytes_in": len(body)}


def outcome(error: BaseException | None) -> dict[str, str]:
    """Returns how a call ended."""
    if error is None:
        return {"outcome": "ok"}
    if isinstance(error, SandboxError):
        reason = {"reason": error.reason} if isinstance(error, RefusedError) else {}
        return {"outcome": type(error).__name__, **reason}
    return {"outcome": "cancelled" if type(error).__name__ == "CancelledError" else "failed"}
