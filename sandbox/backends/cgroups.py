"""Limits of memory, processes and cores by control groups, where this process may make them.

Groups are named `tempering/<node>/<sandbox>`, the node by its process id and start time, so that what a
killed node left can be told from what a living one holds. Versions 1 (a tree a controller) and 2 (one tree)
both work. A best-effort sandbox runs only while nothing else wants the core (or, before version 5.15 of the
kernel, with the smallest weight): with version 1 below a group `tempering-idle` that yields to the whole
machine, with version 2 in a group of its own that yields to other sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import InfrastructureError
from sandbox.types import Latency, Limits

_ROOT = Path("/sys/fs/cgroup")
_SANDBOX = re.compile(r"[0-9a-f]{8}-[0-9a-f]{12}(-g[0-9]+)?")
_PARENT, _IDLE_PARENT = "tempering", "tempering-idle"
_IDLE = (("cpu.idle", 1), ("cpu.weight", 1), ("cpu.shares", 2))
"""In order of preference; a group that is idle has no weight to be set."""

_PERIOD_US = 100_000
SOCKETS = "memory.kmem.tcp.limit_in_bytes"
"""Version 1 counts the buffers of TCP and UDP for nobody until this is set."""

_FIRST_TO_GO = "500"
"""When the machine lacks memory."""

_REMOVE_S, _MOVE_S = 5.0, 5.0
_PAUSE_S = 60.0
"""How long a pause may take: each process stops when it next runs."""

_AGAIN_S, _SELDOM_S = 0.05, 2.0
"""When a pause is asked for anew, first and at last; every time all processes have to run once more."""

_MADE: set[Path] = set()
"""The groups of this process that those of sandboxes are made in."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The control groups of one sandbox, by controller. Empty where the machine does not let us."""

    folders: dict[str, Path]

    @classmethod
    def create(cls, name: str, limits: Limits, root: Path = _ROOT) -> Cgroup:
        """Makes groups with the limits of `limits`; a controller that is not writable is left out."""
        folders: dict[str, Path] = {}
        for controller, values in _settings(limits, unified(root)).items():
            base = root if unified(root) else root / controller
            with contextlib.suppress(OSError):
                folder = _make(base, _PARENT, name, unified(root))
                for file, value in values.items():
                    with contextlib.suppress(FileNotFoundError):
                        _write(f"{folder}/{file}", str(value))
                folders[controller] = folder
        return cls(folders)

    def enter(self) -> None:
        """Takes the calling process, which is to be the first of the sandbox, into the groups.

        Raises:
            OSError: The kernel does not let it.
        """
        for folder in sorted(set(self.folders.values())):
            try:
                _write(f"{folder}/cgroup.procs", "0")
            except OSError:  # a node with real-time priority may not enter groups of cores
                if os.sched_getscheduler(0) == os.SCHED_OTHER:
                    raise
        _write("/proc/self/oom_score_adj", _FIRST_TO_GO)

    def oom_counter(self) -> OomCounter:
        """Returns what counts the processes that the kernel killed for memory."""
        return OomCounter(self.folders.get("memory"))

    async def settle(self, latency: Latency) -> None:
        """Puts a sandbox that is up into its class: one of best effort may not come up on a busy machine."""
        if latency == "best_effort" and "cpu" in self.folders:
            await asyncio.to_thread(self._be_idle)

    def _be_idle(self) -> None:
        folder = self.folders["cpu"]
        if folder == self.folders.get("memory"):  # version 2, where a group has all controllers
            _be_idle(folder)
            return
        idle = _make(folder.parents[2], _IDLE_PARENT, folder.name, False)
        for file in ("cpu.cfs_period_us", "cpu.cfs_quota_us"):
            if (folder / file).exists():
                (idle / file).write_text((folder / file).read_text())
        deadline = time.monotonic() + _MOVE_S
        while (pids := [*_processes(folder)]) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (idle / "cgroup.procs").write_text(str(pid))
        self.folders["cpu"] = idle
        folder.rmdir()

    @property
    def freezes(self) -> bool:
        """Whether it can be paused by this process."""
        return "freezer" in self.folders and os.access(_switch(self.folders["freezer"]), os.W_OK)

    async def freeze(self, stop: bool) -> None:
        """Stops all processes in it, or lets them go on; returns when that has happened.

        With version 1 the kernel never stops a process that is asked between its `vfork` and its wait for the
        child, when the child was stopped before it has its program: asked anew, it stops where it waits.

        Raises:
            InfrastructureError: The kernel does not.
        """
        folder, deadline = self.folders["freezer"], time.monotonic() + _PAUSE_S
        _set_frozen(folder, stop)
        rest_s, patience_s = 0.001, _AGAIN_S
        again = time.monotonic() + patience_s
        while _frozen(folder) is not stop:
            if time.monotonic() > deadline:
                _set_frozen(folder, False)
                raise InfrastructureError(
                    f"the kernel did not {'pause' if stop else 'resume'} in {_PAUSE_S} s"
                )
            if time.monotonic() > again:
                _set_frozen(folder, not stop)
                _set_frozen(folder, stop)
                patience_s = min(2 * patience_s, _SELDOM_S)
                again = time.monotonic() + patience_s
            await asyncio.sleep(rest_s)
            rest_s = min(1.1 * rest_s, 0.05)

    async def remove(self) -> None:
        """Ends what is left in the groups and removes them; one that cannot be is left to `sweep`."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Does what `remove` does, and blocks."""
        remove_groups(sorted(set(self.folders.values())))


def container_groups(container: str, root: Path = _ROOT) -> dict[str, Path]:
    """Returns the groups that the engine made for a container, by controller; any version and driver."""
    found: dict[str, Path] = {}
    for controller in ("memory", "pids", "cpu", "cpuacct", "freezer"):
        base = root if unified(root) else root / controller
        for place in (base / "docker" / container, base / f"system.slice/docker-{container}.scope"):
            if place.exists():
                found[controller] = place
    return found


def groups_of(pid: int, root: Path = _ROOT) -> dict[str, Path]:
    """Returns the groups that a process is in, by controller; with version 2 they are all the same."""
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            if unified(root) and number == "0":
                found |= dict.fromkeys(("memory", "pids", "cpu", "freezer"), root / path.lstrip("/"))
            elif not unified(root):
                places = {name: root / name / path.lstrip("/") for name in names.split(",") if name}
                found |= {name: place for name, place in places.items() if place.exists()}
    return found


@functools.cache
def controllers(root: Path = _ROOT) -> frozenset[str]:
    """Returns the controllers of which this process can make groups."""
    probe = Cgroup.create("probe", Limits(), root)
    for folder in set(probe.folders.values()):
        _remove(folder)
    return frozenset(probe.folders)


@functools.cache
def unified(root: Path) -> bool:
    """Whether the machine has version 2 of control groups."""
    return (root / "cgroup.controllers").exists()


class OomCounter:
    """The kernel's count of processes killed for memory in a group, of either version; cheap to ask."""

    def __init__(self, folder: Path | None):
        self._fd = -1
        for file in ("memory.oom_control", "memory.events"):
            if folder is not None and (folder / file).exists():
                self._fd = os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC)
                break

    def __call__(self) -> int:
        """Returns the count; 0 when the group is gone or never was."""
        with contextlib.suppress(OSError, ValueError):
            words = os.pread(self._fd, 1024, 0).split()
            return int(words[words.index(b"oom_kill") + 1])
        return 0

    def close(self) -> None:
        """Lets go of the group."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep(root: Path = _ROOT) -> list[str]:
    """Removes the groups of nodes that do not live any more, with what runs in them; returns their names."""
    left: set[str] = set()
    for node in _nodes(root):
        if _alive(node.name):
            continue
        with contextlib.suppress(FileNotFoundError):  # another node that starts removes them too
            boxes = [path for path in node.glob("*") if path.is_dir()]
            left |= {path.name for path in boxes}
            with contextlib.suppress(OSError):  # another node that starts removes it too
                remove_groups([*boxes, node])
    return sorted(left)


def own_groups(root: Path = _ROOT) -> dict[str, list[Path]]:
    """Returns the groups of this node's sandboxes, by sandbox; other groups beside them are left out."""
    found: dict[str, list[Path]] = {}
    for node in _nodes(root):
        if node.name == _own_name(os.getpid()):
            for path in node.glob("*"):
                if path.is_dir() and _SANDBOX.fullmatch(path.name):
                    found.setdefault(path.name, []).append(path)
    return found


def leave(root: Path = _ROOT) -> None:
    """Removes the groups that hold those of this node, which ends."""
    remove_groups([node for node in _nodes(root) if node.name == _own_name(os.getpid())])


def _nodes(root: Path) -> list[Path]:
    parents = [place for name in (_PARENT, _IDLE_PARENT) for place in (root / name, *root.glob(f"*/{name}"))]
    return [node for parent in parents for node in parent.glob("*-*") if node.is_dir()]


def _settings(limits: Limits, v2: bool) -> dict[str, dict[str, str | int]]:
    quota = int(limits.cpus * _PERIOD_US)
    if v2:
        return {
            "memory": {"memory.max": limits.memory_bytes, "memory.swap.max": 0, "memory.oom.group": 0},
            "pids": {"pids.max": limits.pids},
            "cpu": {"cpu.max": f"{quota} {_PERIOD_US}"},
            "freezer": {},
        }
    memory = limits.memory_bytes
    return {
        "memory": {
            "memory.limit_in_bytes": memory,
            "memory.memsw.limit_in_bytes": memory,
            SOCKETS: memory,
        },
        "pids": {"pids.max": limits.pids},
        "cpu": {"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": quota},
        "cpuacct": {},
        "freezer": {},
    }


def _make(base: Path, parent: str, name: str, v2: bool) -> Path:
    place = base / parent / _own_name(os.getpid())
    if place in _MADE:
        with contextlib.suppress(FileNotFoundError):
            (place / name).mkdir(exist_ok=True)
            return place / name
    folder = base
    for part in (parent, place.name, name):
        if v2:
            (folder / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        folder = folder / part
        folder.mkdir(exist_ok=True)
        if part == _IDLE_PARENT:
            _be_idle(folder)
    _MADE.add(place)
    return folder


def _write(path: str, text: str) -> None:
    """Writes a file of the kernel that is there, without the layers of a Python file."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _be_idle(folder: Path) -> None:
    """Has the kernel run a group only, or mostly, while nothing else wants to."""
    for file, value in _IDLE:
        if (folder / file).exists():
            (folder / file).write_text(str(value))
            return


def _node_name(pid: int) -> str:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return f"{pid}-{fields[19]}" if fields[0] != "Z" else ""


@functools.cache
def _own_name(pid: int) -> str:
    return _node_name(pid)


def _alive(node: str) -> bool:
    pid = node.split("-")[0]
    with contextlib.suppress(OSError, ValueError):
        return _node_name(int(pid)) == node
    return False


def _processes(folder: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from map(int, (folder / "cgroup.procs").read_text().split())


def remove_groups(folders: Iterable[Path]) -> None:
    """Removes groups in their order; the processes in them take a moment to die."""
    folders, deadline = list(folders), time.monotonic() + _REMOVE_S
    for folder in folders:
        with contextlib.suppress(OSError):  # what is frozen cannot die
            _set_frozen(folder, False)
        with contextlib.suppress(OSError):  # what has no core cannot either
            if (folder / "cpu.idle").exists():
                (folder / "cpu.idle").write_text("0")
    for folder in folders:
        while not _remove(folder) and time.monotonic() < deadline:
            time.sleep(0.005)


def _set_frozen(folder: Path, stop: bool) -> None:
    switch = _switch(folder)
    if switch.name == "cgroup.freeze":
        switch.write_text("1" if stop else "0")
    elif switch.exists():
        switch.write_text("FROZEN" if stop else "THAWED")


def _switch(folder: Path) -> Path:
    v2 = folder / "cgroup.freeze"
    return v2 if v2.exists() else folder / "freezer.state"


def _frozen(folder: Path) -> bool:
    if (folder / "freezer.state").exists():
        return (folder / "freezer.state").read_text().strip() == "FROZEN"
    return "frozen 1" in (folder / "cgroup.events").read_text().splitlines()


def _remove(folder: Path) -> bool:
    for pid in _processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if _IDLE_PARENT in folder.parts:
            with contextlib.suppress(OSError):
                (folder.parents[2] / "cgroup.procs").write_text(str(pid))
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()
