"""What an E2B client is told when something goes wrong: a status for REST and files, a code for its RPCs."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from sandbox.errors import (
    BackendMissingError,
    DiskFullError,
    FileError,
    LostError,
    PolicyError,
    RefusedError,
    SandboxError,
    StartTimeoutError,
)


@dataclass(frozen=True, slots=True)
class Status:
    """An HTTP status and the code of the Connect protocol that stands for the same."""

    http: int
    code: str


BAD = Status(400, "invalid_argument")
UNAUTHENTICATED = Status(401, "unauthenticated")
MISSING = Status(404, "not_found")
THERE = Status(409, "already_exists")
SLOW = Status(408, "deadline_exceeded")
UNOFFERED = Status(501, "unimplemented")
GONE = Status(502, "unavailable")
BROKEN = Status(500, "internal")
_KINDS: tuple[tuple[type[SandboxError], Status], ...] = (
    (RefusedError, Status(429, "resource_exhausted")),
    (PolicyError, BAD),
    (BackendMissingError, BAD),
    (DiskFullError, Status(507, "resource_exhausted")),
    (LostError, MISSING),
    (StartTimeoutError, Status(503, "unavailable")),
)
_FILE_ERRORS = {
    "FileNotFoundError": MISSING, "NotADirectoryError": MISSING, "FileExistsError": THERE,
    "PermissionError": Status(403, "permission_denied"),
}  # fmt: skip
_FOR_GOOD = frozenset({"quota", "memory", "disk"})
"""Refusals that are not over by the time a client has asked three times."""


class E2BError(Exception):
    """An answer that is an error; the text says what, why and what to do."""

    def __init__(self, status: Status, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, headers or {}


def said(error: SandboxError) -> E2BError:
    """Returns an error of the fleet as the control plane's answer."""
    status = next((status for kind, status in _KINDS if isinstance(error, kind)), BROKEN)
    if isinstance(error, FileError) and status is BROKEN:
        status = _FILE_ERRORS.get(str(error).rpartition(" failed: ")[2].partition(":")[0], BAD)
    retry = {"Should-Retry": "false"} if isinstance(error, RefusedError) and error.reason in _FOR_GOOD else {}
    return E2BError(status, str(error), retry)


def said_inside(error: SandboxError, box: str) -> E2BError:
    """Returns an error of the fleet as a sandbox's answer, in words by which clients know that it is gone."""
    if isinstance(error, LostError):
        return E2BError(GONE, f"The sandbox {box} was not found: {error}")
    if isinstance(error, RefusedError) and error.reason == "paused":
        return E2BError(GONE, f"The sandbox {box} was not found running: it is paused, connect() resumes it")
    return said(error)


def refusal(error: E2BError, *, rpc: bool) -> web.Response:
    """Returns an error as a whole answer, of an RPC or of the REST interface."""
    code = error.status.code if rpc else error.status.http
    response = web.json_response(
        {"code": code, "message": str(error)}, status=error.status.http, headers=error.headers
    )
    if error.status is UNAUTHENTICATED:
        response.force_close()
    return response
