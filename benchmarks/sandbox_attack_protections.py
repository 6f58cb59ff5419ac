"""Protections, each of which can be switched off for real in the benchmark's own node, to see it missed.

Switching off replaces a function of the product within this process. There is no option, variable or message
by which a node could be told to do the same.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import sandbox.backends
import sandbox.births
import sandbox.box
import sandbox.resident
from sandbox.backends import base, bwrap, cgroups, seccomp
from sandbox.backends.launch import Launch
from sandbox.channel import MAX_BODY, Header
from sandbox.layers import writable
from sandbox.trees import Checker, Entry
from sandbox.types import Limits

Change = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class Protection:
    """One wall: how it is taken down, and an attack that must then get through."""

    name: str
    what: str
    attack: str
    switch_off: Callable[[], None]


def _bubblewrap(change: Callable[[list[str]], list[str]]) -> None:
    """Changes the command line of every bubblewrap sandbox."""
    launches: Any = Launch
    fork = launches.fork

    def forked(command: list[str], *more: Any, **how: Any) -> Launch:
        return fork(change(command), *more, **how)

    launches.fork = forked


def _without(*options: str) -> Callable[[list[str]], list[str]]:
    return lambda argv: [word for word in argv if word not in options]


def _docker(change: Change) -> None:
    """Changes the settings of every container."""
    try:
        from docker.models.containers import ContainerCollection
    except ImportError:
        return
    collection: Any = ContainerCollection
    create = collection.create

    def changed(self: Any, *args: Any, **how: Any) -> Any:
        change(how)
        return create(self, *args, **how)

    collection.create = changed


def _cgroups(controller: str) -> None:
    """Leaves a controller's limits unwritten."""
    settings = cgroups._settings  # pyright: ignore[reportPrivateUsage]

    def changed(limits: Limits, v2: bool) -> dict[str, dict[str, str | int]]:
        return {name: {} if name == controller else values for name, values in settings(limits, v2).items()}

    cgroups._settings = changed  # pyright: ignore[reportPrivateUsage]


def _commands(change: Callable[[dict[str, Any]], None], limits: Mapping[str, int] | None = None) -> None:
    """Changes what the agents of all backends are told."""
    usual = base.agent_command

    def changed(folder: str, given: Limits, **how: Any) -> list[str]:
        change(how)
        return usual(folder, replace(given, **dict(limits or {})), **how)

    for module in pkgutil.iter_modules(sandbox.backends.__path__):
        loaded = importlib.import_module(f"sandbox.backends.{module.name}")
        if hasattr(loaded, "agent_command"):
            setattr(loaded, "agent_command", changed)  # noqa: B010


def no_seccomp() -> None:
    """Commands may make every system call."""
    seccomp.program = lambda *_: ""
    _docker(lambda how: how["security_opt"].append("seccomp=unconfined"))


def no_pids() -> None:
    """No limit of processes."""
    _cgroups("pids")
    _docker(lambda how: how.update(pids_limit=-1))


def no_memory() -> None:
    """No limit of memory."""
    _cgroups("memory")
    _docker(lambda how: [how.pop(name) for name in ("mem_limit", "memswap_limit")])


def no_cpu() -> None:
    """No limit of cores."""
    _cgroups("cpu")
    _docker(lambda how: how.pop("nano_cpus"))


def no_tmpfs() -> None:
    """Folders without a size, files without one either."""

    def unsized(argv: list[str]) -> list[str]:
        places = {at + 1 for at, word in enumerate(argv) if word == "--size"}
        return [str(1 << 40) if at in places else word for at, word in enumerate(argv)]

    def container(how: dict[str, Any]) -> None:
        how["tmpfs"] = dict.fromkeys(how["tmpfs"], "rw,exec,mode=1777")
        how["ulimits"] = [limit for limit in how["ulimits"] if limit.name != "fsize"]

    writable.tmpfs = lambda limits, mode: f"mode={mode:o}".encode()
    _bubblewrap(unsized)
    _docker(container)
    _commands(lambda how: None, {"tmpfs_bytes": 1 << 40})


def no_open_files() -> None:
    """A million open files a process."""
    _commands(lambda how: None, {"open_files": 20_000})
    _docker(lambda how: how.update(ulimits=[limit for limit in how["ulimits"] if limit.name != "nofile"]))


def no_output_cap() -> None:
    """The agent is told to keep all output."""
    run: Any = sandbox.box.Box._run  # pyright: ignore[reportPrivateUsage]

    async def changed(self: Any, header: Header, *rest: Any) -> Any:
        more = {"limit": MAX_BODY // 4} if header["op"] == "exec" else {}
        return await run(self, {**header, **more}, *rest)

    box: Any = sandbox.box.Box
    box._run = changed


def with_network() -> None:
    """The host's network."""
    _bubblewrap(_without("--unshare-net"))
    _docker(lambda how: how.update(network_mode="bridge", network_disabled=False))


def with_processes() -> None:
    """The host's processes, and its queues and shared memory."""
    _bubblewrap(_without("--unshare-pid", "--unshare-ipc"))
    _docker(lambda how: how.update(pid_mode="host", ipc_mode="host", init=False))


def with_capabilities() -> None:
    """The agent keeps all of root's capabilities."""

    def kept(argv: list[str]) -> list[str]:
        drop = {
            at + more
            for at, word in enumerate(argv)
            if word in ("--cap-drop", "--cap-add")
            for more in (0, 1)
        }
        return [word for at, word in enumerate(argv) if at not in drop]

    _bubblewrap(kept)
    _docker(lambda how: how.update(cap_drop=[], cap_add=["ALL"]))


def no_users() -> None:
    """Commands run as the agent's user."""
    _commands(lambda how: how.update(uid=None))


def writable_toolkit() -> None:
    """The agent's folder, and a container's system, can be written to."""

    def writable(argv: list[str]) -> list[str]:
        places = [
            at for at, word in enumerate(argv) if word == "--ro-bind" and argv[at + 2].endswith("/agent")
        ]
        return ["--bind" if at in places else word for at, word in enumerate(argv)]

    _bubblewrap(writable)
    _docker(lambda how: how.update(read_only=False))


def no_channel_checks() -> None:
    """What an agent says is believed."""
    resident: Any = sandbox.resident.Resident

    def believe(self: Any, header: Header, body: bytes) -> None:
        waiting = self._waiting.get(header.get("id")) or next(iter(self._waiting.values()), None)
        if waiting is not None and not waiting.done():
            waiting.set_result((header, body))

    resident._deliver = believe
    sandbox.box.check_result = lambda header, *_: header


def no_archive_checks() -> None:
    """Entries of archives and trees pass as they are."""

    def passed(self: Checker, entry: Entry) -> Entry:
        return entry

    Checker.check = passed


def no_admission() -> None:
    """The node takes whatever it is asked for."""
    sandbox.births.admit = lambda *_: None


def no_own_users() -> None:
    """All sandboxes share the user of their commands."""
    _commands(lambda how: how.update(uid=None if how.get("uid") is None else base.COMMAND_UID))


def no_masks() -> None:
    """The kernel's files in /proc are there as they are."""
    module: Any = bwrap
    module.masks = lambda: ()
    bwrap.system.cache_clear()


_ALL = (
    ("seccomp", "namespaces, mounts and tracing", no_seccomp),
    ("pids", "a thousand processes at once", no_pids),
    ("memory", "allocation beyond the limit", no_memory),
    ("cpu", "full processor at half a core", no_cpu),
    ("tmpfs", "files unlinked while open", no_tmpfs),
    ("open-files", "open files", no_open_files),
    ("output-cap", "endless output", no_output_cap),
    ("no-network", "network of nothing", with_network),
    ("processes", "processes of others", with_processes),
    ("capabilities", "an agent that breaks out", with_capabilities),
    ("users", "no power in commands", no_users),
    ("own-users", "inotify instances", no_own_users),
    ("toolkit-mount", "an agent that changes the toolkit", writable_toolkit),
    ("channel-checks", "lies on the channel", no_channel_checks),
    ("archive-checks", "hostile archives", no_archive_checks),
    ("admission", "burst of creations", no_admission),
    ("masks", "an agent that reads the host", no_masks),
)
PROTECTIONS: Mapping[str, Protection] = {
    name: Protection(name, " ".join(cast("str", off.__doc__).split()), attack, off)
    for name, attack, off in _ALL
}
