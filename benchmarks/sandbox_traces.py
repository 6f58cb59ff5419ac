"""What the sandboxes of a state folder leave on a machine: everything that could be an orphan, by kind.

A process is one of theirs when its command line or its mounts name the state folder: every process in a
sandbox of the light tier has the folder's toolkit mounted, whoever started it. Containers carry a label.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.sandbox_breakpoint import alive

_CGROUPS = Path("/sys/fs/cgroup")
_SHARED = frozenset({"toolkit", "layers", "mounts"})
"""Folders of the state folder that belong to the node and to no sandbox."""


@dataclass(frozen=True, slots=True)
class Traces:
    """Names of what there is, by kind."""

    processes: tuple[str, ...]
    containers: tuple[str, ...]
    cgroups: tuple[str, ...]
    mounts: tuple[str, ...]
    sockets: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(len(getattr(self, field.name)) for field in fields(self))

    def live(self) -> Traces:
        """Returns all but the files, which journals may be for a day."""
        return Traces(self.processes, self.containers, self.cgroups, self.mounts, self.sockets, ())

    def __str__(self) -> str:
        there = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return "; ".join(f"{name}: {', '.join(found)}" for name, found in there if found) or "nothing"


def traces(
    state_dir: Path, nodes: Collection[int], servers: Collection[int] = (), docker: Any = None
) -> Traces:
    """Returns what there is besides the living node itself.

    Args:
        state_dir: Of the node.
        nodes: Process ids of all nodes that it has had; those that live are no traces, nor is their socket.
        servers: Process ids of what may name the folder: node agents, clients.
        docker: A client of the engine; without it no containers are looked for.
    """
    living = {pid for pid in nodes if alive(pid)}
    groups = [group for pid in nodes for group in _groups(pid, alive=pid in living)]
    return Traces(
        tuple(_processes(state_dir, living | {*servers})),
        tuple(_containers(state_dir, docker)),
        tuple(groups),
        tuple(_mounts(state_dir)),
        tuple(_sockets(state_dir, {"node.sock"} if living else set())),
        tuple(_files(state_dir)),
    )


def _processes(state_dir: Path, known: Collection[int]) -> Iterator[str]:
    mark = str(state_dir).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) in known:
            continue
        try:
            command = (folder / "cmdline").read_bytes()
            if command and (mark in command or mark in (folder / "mountinfo").read_bytes()):
                shown = command.replace(b"\0", b" ").decode(errors="replace")
                yield f"{folder.name} {shown[:60].strip()}"
        except OSError:  # it has ended meanwhile, or is another user's
            continue


def _containers(state_dir: Path, docker: Any) -> Iterator[str]:
    if docker is not None:
        labels = {"label": f"tempering.state_dir={state_dir}"}
        for container in docker.api.containers(all=True, filters=labels):
            yield container["Id"][:12]


def _groups(node: int, *, alive: bool) -> Iterator[str]:
    for group in [*_CGROUPS.glob(f"tempering/{node}-*"), *_CGROUPS.glob(f"*/tempering/{node}-*")]:
        if not alive:
            yield str(group)
        yield from (str(box) for box in group.glob("*") if box.is_dir())


def _mounts(state_dir: Path) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if str(state_dir) in line:
            yield line.split()[4]


def _sockets(state_dir: Path, known: Collection[str]) -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        path = Path(line.split(maxsplit=7)[7]) if len(line.split(maxsplit=7)) > 7 else Path()
        if path.is_relative_to(state_dir) and path.name not in known:
            yield str(path)


def _files(state_dir: Path) -> Iterator[str]:
    for folder in state_dir.iterdir():
        if folder.is_dir() and folder.name not in _SHARED:
            yield from (str(path.relative_to(state_dir)) for path in folder.rglob("*") if path.is_file())
