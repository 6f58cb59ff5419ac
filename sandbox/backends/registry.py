"""The backends by name, and which one `auto` stands for."""

from __future__ import annotations

from pathlib import Path

from sandbox.backends.base import AUTO, Backend
from sandbox.backends.bubblewrap import Bubblewrap
from sandbox.backends.docker import Docker
from sandbox.backends.function import Function
from sandbox.backends.gvisor import Gvisor
from sandbox.errors import BackendMissingError
from sandbox.layers.compose import Composer

_GET_ONE = (
    "install bubblewrap (as root: apt-get install bubblewrap) or start a Docker engine "
    "(as root: apt-get install docker.io, then dockerd)"
)


def backends(state_dir: Path | None = None) -> dict[str, Backend]:
    """Returns the backends for the node of a state folder."""
    composer = Composer(state_dir) if state_dir else None
    docker, light = Docker(state_dir, composer), Bubblewrap(state_dir, composer)
    among: tuple[Backend, ...] = (docker, light, Gvisor(state_dir), Function(state_dir))
    return {backend.name: backend for backend in among}


async def choose(name: str, among: dict[str, Backend]) -> Backend:
    """Returns the backend called `name`, or for `auto` the first that this machine has.

    Raises:
        BackendMissingError: It is unknown or missing. An explicit choice is never replaced by another.
    """
    if name != "auto":
        if name not in among:
            raise BackendMissingError(f"there is no sandbox backend {name!r}; there are {', '.join(among)}")
        if problem := await among[name].missing():
            raise BackendMissingError(f"sandbox backend {name!r} cannot be used: {problem}")
        return among[name]
    problems: list[str] = []
    for backend in (among[name] for name in AUTO if name in among):
        problem = await backend.missing()
        if not problem:
            return backend
        problems.append(f"{backend.name}: {problem}")
    raise BackendMissingError(f"no sandbox backend is available ({'; '.join(problems)}): {_GET_ONE}")
