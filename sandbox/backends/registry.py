"""The backends by name, and which one `auto` stands for."""

from __future__ import annotations

from sandbox.backends.base import Backend
from sandbox.backends.bubblewrap import Bubblewrap
from sandbox.backends.docker import Docker
from sandbox.errors import BackendMissingError

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Docker(), Bubblewrap())}
"""In the order in which `auto` prefers them."""

_GET_ONE = (
    "install bubblewrap (as root: apt-get install bubblewrap) or start a Docker engine "
    "(as root: apt-get install docker.io, then dockerd)"
)


async def choose(name: str) -> Backend:
    """Returns the backend called `name`, or for `auto` the first that this machine has.

    Raises:
        BackendMissingError: It is unknown or missing. An explicit choice is never replaced by another.
    """
    if name != "auto":
        if name not in BACKENDS:
            raise BackendMissingError(
                f"there is no sandbox backend {name!r}; there are {', '.join(BACKENDS)}"
            )
        if problem := await BACKENDS[name].missing():
            raise BackendMissingError(f"sandbox backend {name!r} cannot be used: {problem}")
        return BACKENDS[name]
    problems: list[str] = []
    for backend in BACKENDS.values():
        problem = await backend.missing()
        if not problem:
            return backend
        problems.append(f"{backend.name}: {problem}")
    raise BackendMissingError(f"no sandbox backend is available ({'; '.join(problems)}): {_GET_ONE}")
