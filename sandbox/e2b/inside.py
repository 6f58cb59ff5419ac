"""A sandbox as the requests to it see it: found by its headers, opened by its key."""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections import OrderedDict
from dataclasses import dataclass

from aiohttp import web

from sandbox.e2b.access import Keys
from sandbox.e2b.link import FrontLink, Watched
from sandbox.e2b.records import Home
from sandbox.e2b.status import BAD, UNOFFERED, E2BError
from sandbox.remote import RemoteBox

AGENT_PORT = "49983"
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Inside:
    """One sandbox, and what its commands find."""

    box: RemoteBox
    link: FrontLink
    home: Home

    def path(self, path: object) -> str:
        """Returns a path, from the sandbox's folder unless it is absolute.

        Raises:
            E2BError: It is none.
        """
        if not isinstance(path, str) or not path or "\0" in path:
            raise E2BError(BAD, "a path is a text without NUL, and not empty")
        return posixpath.normpath(posixpath.join(self.home.cwd, path))


class Doors:
    """Opens sandboxes to their clients."""

    def __init__(self, keys: Keys, watched: Watched):
        self._keys, self._watched = keys, watched
        self._homes: OrderedDict[str, Home] = OrderedDict()

    async def open(self, request: web.Request) -> Inside:
        """Returns the sandbox that a request names and has the key of.

        Raises:
            E2BError: It has not, or wants something else than the sandbox's agent.
            LostError: The sandbox is gone.
        """
        name = request.headers.get("E2b-Sandbox-Id", "")
        who = self._keys.holder(request.headers.get("X-Access-Token", ""), name)
        if request.headers.get("E2b-Sandbox-Port", AGENT_PORT) != AGENT_PORT:
            raise E2BError(UNOFFERED, "sandboxes have no ports that can be reached from outside")
        link = FrontLink(self._watched(who))
        if name not in self._homes:
            self._homes[name] = Home.of((await link.describe(name))[0]["labels"])
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        return Inside(link.box(name), link, self._homes[name])


def user_of(request: web.Request) -> int | None:
    """Returns the user whom a command is to run as: a number, or nobody in particular.

    Raises:
        E2BError: It is one that there is not.
    """
    kind, _, code = request.headers.get("Authorization", "").partition(" ")
    if kind != "Basic":
        return None
    try:
        name = base64.b64decode(code, validate=True).decode().partition(":")[0]
    except (binascii.Error, ValueError) as error:
        raise E2BError(BAD, "the user cannot be read") from error
    return number_of(name)


def number_of(name: str) -> int | None:
    """Returns a user by name.

    Raises:
        E2BError: There is none of that name.
    """
    if name in ("", "user"):
        return None
    if name.isascii() and name.isdecimal() and len(name) < 6:
        return int(name)
    raise E2BError(
        BAD,
        f"there is no user {name[:40]!r}: commands run as 'user' or a number, never as root",
    )
