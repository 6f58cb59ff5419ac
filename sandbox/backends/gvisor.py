"""The gVisor tier: by `runsc`, without a daemon, a kernel in user space between a sandbox and this machine.

Commands never reach the host's kernel: gVisor answers their system calls, and itself makes few. The price is
time (a command takes tens of milliseconds with the old ptrace platform). The main process is the resident
agent, its channel `runsc`'s stdin and stdout, so the sandbox ends with its node. Control groups of ours hold
`runsc` and all that it starts: its own support differs from version to version, and ours ends it for certain.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Set
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from sandbox.backends.base import COMMAND_UID, Started, Unprepared, agent_command, refuse_layers
from sandbox.backends.cgroups import Cgroup, controllers, leave, sweep
from sandbox.backends.launch import Launch
from sandbox.errors import InfrastructureError
from sandbox.toolkit import build
from sandbox.types import Capabilities, Latency, Limits, SandboxSpec

INSTALL = "as root: apt-get install runsc, or https://gvisor.dev/docs/user_guide/install"
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_SCRATCH = ("/tmp", "/workspace", "/dev/shm")
_AGENT_AT = "/run/tempering"
_PYTHON = "/usr/bin/python3"
_LISTERS = ("/usr/bin/ls", "/usr/bin/stat")
"""An old gVisor refuses a flag that these give to every call; busybox has them without it."""

_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
_NEEDED = frozenset({"memory", "pids"})
_OWN_BYTES = 192 << 20
"""What gVisor itself may use besides the memory of the sandbox."""

_OWN_THREADS, _THREADS_A_PROCESS = 256, 16
"""A process of the sandbox has several threads on the host, as many as have traced it."""

_PROBE_S, _END_S = 30.0, 20.0
_ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath)}


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A sandbox as `runsc` sees it: its name, the folder of its specification, and where states are kept."""

    name: str
    folder: Path
    states: Path

    def runsc(self, *words: str) -> list[str]:
        return [
            "runsc", f"--root={self.states}", "--network=none", "--ignore-cgroups",
            "--file-access-mounts=exclusive", *words,
        ]  # fmt: skip


class Gvisor(Unprepared):
    """Starts sandboxes with `runsc run`."""

    name = "gvisor"

    def __init__(self, state_dir: Path | None = None) -> None:
        self._folder = _folder_of(state_dir) if state_dir is not None else None
        self._agent: Path | None = None
        self._works, self._lists = False, True
        self._probing = asyncio.Lock()

    async def missing(self) -> str:
        """Returns what this machine lacks; tries a sandbox for real, once."""
        if lacking := _lacking():
            return lacking
        async with self._probing:
            return "" if self._works else await self._probe()

    def capabilities(self) -> Capabilities:
        """Returns what holds here.

        Memory is bounded for each process by an error of allocation, and for all by the end of the sandbox;
        so is the number of processes, which gVisor itself does not limit.
        """
        held = controllers()
        return Capabilities(
            images=False,
            memory_limit="memory" in held,
            process_limit=False,
            cpu_limit="cpu" in held,
            inode_limit=False,
            separate_users=True,
            pause="freezer" in held,
            oom_told=False,
            terminal_signals=False,
            terminal_limit=True,
            own_kernel=True,
            own_users=True,
            masked_kernel=True,
        )

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one sandbox.

        Raises:
            PolicyError: An image or a layer was asked for.
            InfrastructureError: runsc could not be started.
        """
        refuse_layers(self.name, spec)
        if problem := await self.missing():
            raise InfrastructureError(f"runsc cannot be used any more: {problem}")
        assert self._folder is not None, "a backend without a state folder only looks around"
        if self._agent is None:
            self._agent = await asyncio.to_thread(build, self._folder / "toolkit", _PYTHON)
        limits = spec.limits
        agent = agent_command(_AGENT_AT, limits, uid=COMMAND_UID, alone=True)
        bundle = await asyncio.to_thread(
            _make_bundle, self._folder, box_id, [_PYTHON, *agent], self._mounts(limits)
        )
        command = bundle.runsc("run", f"--bundle={bundle.folder}", bundle.name)
        command[0] = shutil.which(command[0]) or command[0]
        cgroup = Cgroup.create(box_id, _with_own(limits))
        try:
            launch = Launch.fork(command, _ENVIRONMENT, cgroup.enter, gated=False)
            await launch.entered()
        except BaseException as error:
            await cgroup.remove()
            if isinstance(error, OSError):
                raise InfrastructureError(f"runsc could not be started: {error}") from error
            raise
        return await _started(launch, cgroup, bundle, spec.latency)

    async def reclaim(self, state_dir: Path) -> list[str]:
        """Ends what is left of an earlier node's sandboxes, by control group, and removes their records."""
        left = await asyncio.to_thread(sweep)
        await asyncio.to_thread(shutil.rmtree, _folder_of(state_dir), True)
        return left

    async def reap(self, held: Callable[[], Set[str]]) -> list[str]:
        """Sandboxes are what runs in their control groups, of which the node's reaper takes care."""
        return []

    def leave(self) -> None:
        """Removes what is shared between the node's sandboxes."""
        leave()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _mounts(self, limits: Limits) -> list[dict[str, Any]]:
        mounts: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
        for path in (*_SYSTEM, *_ETC):
            if os.path.exists(path) and (path in _ETC or not os.path.islink(path)):
                mounts.append(_bind(os.path.realpath(path), path))
        if not self._lists and (busybox := shutil.which("busybox")):
            mounts += [_bind(os.path.realpath(busybox), path) for path in _LISTERS if os.path.exists(path)]
        if self._agent is not None:
            mounts.append(_bind(str(self._agent), f"{_AGENT_AT}/agent"))
        sized = ["nosuid", "nodev", "mode=1777", f"size={limits.tmpfs_bytes}"]
        for path in _SCRATCH:
            mounts.append({"destination": path, "type": "tmpfs", "source": "tmpfs", "options": sized})
        return mounts

    async def _probe(self) -> str:
        with tempfile.TemporaryDirectory() as scratch:
            return await self._probe_in(Path(scratch))

    async def _probe_in(self, folder: Path) -> str:
        look = "import os; print('here', flush=True); os.execv('/usr/bin/ls', ['ls', '-d', '/tmp'])"
        argv, mounts = [_PYTHON, "-I", "-S", "-c", look], self._mounts(Limits())
        bundle = await asyncio.to_thread(_make_bundle, folder, "probe", argv, mounts)
        process = await asyncio.create_subprocess_exec(
            *bundle.runsc("run", f"--bundle={bundle.folder}", bundle.name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_PROBE_S):
                out, problem = await process.communicate()
        except TimeoutError:
            out, problem = b"", f"it did nothing for {_PROBE_S:.0f} s".encode()
        finally:
            await _delete(bundle)
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._lists = out.endswith(b"/tmp\n")
        self._works = out.startswith(b"here\n") and (self._lists or shutil.which("busybox") is not None)
        if not out.startswith(b"here\n"):
            return f"runsc cannot run a sandbox here: {_last_line(problem)}"
        if not self._works:
            return "this runsc is too old for `ls`: get a newer one or, as root, apt-get install busybox"
        return ""


def _folder_of(state_dir: Path) -> Path:
    return state_dir.absolute() / "gvisor"


def _lacking() -> str:
    if shutil.which("runsc") is None:
        return f"runsc is not installed ({INSTALL})"
    if os.geteuid() != 0:
        return "runsc needs root here"
    if not os.path.exists(_PYTHON):
        return f"there is no {_PYTHON} (as root: apt-get install python3)"
    if not controllers() >= _NEEDED:
        return "there are no control groups of memory and pids that this process may make"
    return ""


def _make_bundle(base: Path, name: str, argv: list[str], mounts: list[dict[str, Any]]) -> _Bundle:
    root, folder = base / "root", base / "bundles" / name
    _make_root(root)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_specification(root, argv, mounts)))
    return _Bundle(f"tempering-{name}", folder, base / "states")


async def _started(launch: Launch, cgroup: Cgroup, bundle: _Bundle, latency: Latency) -> Started:
    channel = await launch.go()
    oom_kills = cgroup.oom_counter()

    async def kill() -> None:
        oom_kills.close()
        channel.close()
        await cgroup.remove()
        if any(folder.exists() for folder in cgroup.folders.values()):
            await _delete(bundle)  # takes seconds when the sandbox is gone already
        await launch.wait()
        await asyncio.to_thread(_forget, bundle)

    async def pause(stop: bool) -> None:
        await cgroup.freeze(stop)

    settle, pausing = functools.partial(cgroup.settle, latency), pause if cgroup.freezes else None
    return Started(channel, kill, oom_kills, pausing, lambda: cgroup.folders, settle=settle)


async def _delete(bundle: _Bundle) -> None:
    """Has `runsc` itself end a sandbox."""
    delete = await asyncio.create_subprocess_exec(
        *bundle.runsc("delete", "--force", bundle.name),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_END_S):
            await delete.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            delete.kill()
        await delete.wait()


def _forget(bundle: _Bundle) -> None:
    """Removes what is written down of a sandbox that has ended."""
    for record in bundle.states.glob(f"{bundle.name}_sandbox:*"):
        record.unlink(missing_ok=True)
    shutil.rmtree(bundle.folder, ignore_errors=True)


def _with_own(limits: Limits) -> Limits:
    """Returns the limits of the sandbox as the host sees it, gVisor's own needs included."""
    return changed(
        limits,
        memory_bytes=limits.memory_bytes + _OWN_BYTES,
        pids=_OWN_THREADS + _THREADS_A_PROCESS * limits.pids,
    )


def _make_root(root: Path) -> None:
    """Makes the root of all sandboxes, which holds nothing but the places of mounts."""
    for path in (*_SCRATCH, "/proc", "/dev", "/etc", f"{_AGENT_AT}/agent"):
        (root / path[1:]).mkdir(parents=True, exist_ok=True)
    for path in _SYSTEM:
        place = root / path[1:]
        if os.path.islink(path):
            if not place.is_symlink():
                place.symlink_to(os.readlink(path))
        elif os.path.isdir(path):
            place.mkdir(exist_ok=True)
    for path in _ETC:
        place = root / path[1:]
        if os.path.isdir(path):
            place.mkdir(exist_ok=True)
        elif os.path.exists(path):
            place.touch()
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o755)  # whatever this process's mask is


def _bind(source: str, at: str) -> dict[str, Any]:
    return {"destination": at, "type": "bind", "source": source, "options": ["rbind", "ro"]}


def _specification(root: Path, argv: list[str], mounts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/workspace",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or ["no reason"])[-1][:200]
