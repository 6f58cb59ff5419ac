"""Who may call a server: tokens, compared in constant time, and the projects that they speak for.

Tokens come from a file that only its user can read, or from the environment; never from a command line,
where every user of the machine could read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox.errors import PolicyError
from sandbox.placement import Room

TOKEN, TOKEN_FILE = "TEMPER_SANDBOX_TOKEN", "TEMPER_SANDBOX_TOKEN_FILE"
NODE_TOKEN, NODE_TOKEN_FILE = "TEMPER_SANDBOX_NODE_TOKEN", "TEMPER_SANDBOX_NODE_TOKEN_FILE"
_SHORTEST = 16
_NAME = r"^[a-z0-9][a-z0-9_-]*(/[a-z0-9][a-z0-9_-]*)*$"
Role = Literal["user", "operator"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quota(_Strict):
    """What a project and all below it may hold at once; what is not set is not limited."""

    sandboxes: int | None = Field(None, ge=0)
    memory_bytes: int | None = Field(None, ge=0)
    cpus: float | None = Field(None, ge=0)

    def exceeded(self, held: Room) -> str:
        """Returns which part of it `held` is above, in words; empty when none."""
        for name, most, now in (
            ("sandboxes", self.sandboxes, held.sandboxes),
            ("memory_bytes", self.memory_bytes, held.memory_bytes),
            ("cpus", self.cpus, held.cpus),
        ):
            if most is not None and now > most:
                return f"{now:g} of {most:g} {name}"
        return ""


class _Entry(_Strict):
    name: str = Field(min_length=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    project: str = Field(pattern=_NAME)
    role: Role = "user"


class _Access(_Strict):
    version: Literal[1]
    projects: dict[str, Quota]
    tokens: list[_Entry] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: a name for the audit log, a project, and whether it operates the fleet."""

    name: str
    project: str
    operator: bool = False

    def oversees(self, project: str) -> bool:
        """Whether `project` is its own or below it, or it operates the fleet."""
        return self.operator or within(project, self.project)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call, and what each project may hold."""

    principals: tuple[tuple[bytes, Principal], ...]
    quotas: Mapping[str, Quota]

    def principal(self, authorization: str) -> Principal | None:
        """Returns who an `Authorization` header stands for; takes as long whether it is right or wrong."""
        kind, _, token = authorization.partition(" ")
        given, found = _digest(token.strip()), None
        for digest, principal in self.principals:
            if hmac.compare_digest(digest, given):
                found = principal
        return found if kind == "Bearer" else None


def within(project: str, above: str) -> bool:
    """Whether a project is `above` or below it."""
    return project == above or project.startswith(above + "/")


def fresh_token() -> tuple[str, str]:
    """Returns a new token and the SHA-256 by which an access file knows it."""
    token = secrets.token_urlsafe(32)
    return token, _digest(token).hex()


def read_access(path: Path | None, environment: Mapping[str, str]) -> Access:
    """Returns who may call a front: those of an access file, or whoever has the token of the environment.

    Raises:
        PolicyError: There is no token at all, a weak one, or the file is wrong or readable by others.
    """
    if path is None:
        token = read_token(environment, TOKEN, TOKEN_FILE)
        return Access(((_digest(token), Principal("environment", "default", operator=True)),), {})
    try:
        access = _Access.model_validate(json.loads(_private(path)))
    except (ValidationError, ValueError) as error:
        raise PolicyError(f"{path} is not an access file: {error}") from error
    for project in access.projects:
        if not project or not all(part.strip() == part and part for part in project.split("/")):
            raise PolicyError(f"{path}: {project!r} is not the name of a project")
    principals = tuple(
        (bytes.fromhex(entry.sha256), Principal(entry.name, entry.project, entry.role == "operator"))
        for entry in access.tokens
    )
    return Access(principals, access.projects)


def read_token(environment: Mapping[str, str], name: str, file_name: str) -> str:
    """Returns the token that the environment has or names a file of.

    Raises:
        PolicyError: There is none, or it can be guessed or read by others.
    """
    token = environment.get(name, "")
    if not token and (path := environment.get(file_name)):
        token = _private(Path(path)).strip()
    if not token:
        raise PolicyError(f"there is no token: set {name}, or {file_name} to a file that only you can read")
    if len(token) < _SHORTEST:
        raise PolicyError(
            f"a token of {len(token)} characters can be guessed: `temper sandbox token` makes a good one"
        )
    return token


def own_token(path: Path) -> str:
    """Returns the token in a file, which is made, for its user alone, when it is not there.

    Raises:
        PolicyError: Others can read it, or it cannot be made.
    """
    if not path.exists():
        try:
            _make(path)
        except OSError as error:
            raise PolicyError(f"{path} cannot be made: {error.strerror}") from error
    token = _private(path).strip()
    if len(token) < _SHORTEST:
        raise PolicyError(f"{path} holds no token (any more): delete it, and the next start makes a new one")
    return token


def _make(path: Path) -> None:
    """Writes a new token into a file that appears whole, unless somebody else was faster."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(fresh_token()[0])
            file.flush()
            os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def token_access(token: str, name: str) -> Access:
    """Returns that of a server which only one caller knows the token of."""
    return Access(((_digest(token), Principal(name, "default", operator=True)),), {})


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _private(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o077:
                raise PolicyError(f"{path} holds secrets and others can read it: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise PolicyError(f"{path} cannot be read: {error.strerror}") from error
