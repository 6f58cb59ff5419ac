"""The light tier: namespaces by bubblewrap. No network, sized writable places, no capabilities.

The sandbox shares the host's kernel; its root is the host's `/usr`, read-only, or composed of layers. It
starts in milliseconds and needs no daemon. Run by root, the agent keeps the capabilities to change user and
to kill, and commands run as another user.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Set
from pathlib import Path

from sandbox.backends import bwrap
from sandbox.backends.base import Started
from sandbox.backends.cgroups import Cgroup, controllers, leave, sweep
from sandbox.backends.users import USERS
from sandbox.egress import jail
from sandbox.egress.doors import door_of
from sandbox.errors import InfrastructureError, PolicyError
from sandbox.layers.built_in import Control, ensure_control
from sandbox.layers.compose import Composed, Composer
from sandbox.layers.writable import BOX, Private, Writable, private
from sandbox.toolkit import AGENT, build
from sandbox.types import Capabilities, SandboxSpec


class Bubblewrap:
    """Starts sandboxes with `bwrap`."""

    name = "bubblewrap"

    def __init__(self, state_dir: Path | None = None, composer: Composer | None = None) -> None:
        self._state_dir = state_dir
        self._composer = composer or (Composer(state_dir) if state_dir else None)
        self._agent = AGENT
        self._control: Control | None = None

    async def missing(self) -> str:
        """Returns what this machine lacks; tries a sandbox for real, as kernels may forbid namespaces."""
        if shutil.which("bwrap") is None:
            return "bubblewrap is not installed (apt-get install bubblewrap)"
        probe = await asyncio.create_subprocess_exec(
            *bwrap.namespaces(),
            *bwrap.system(),
            "--",
            "/bin/true",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, problem = await probe.communicate()
        if probe.returncode == 0:
            return ""
        return f"bwrap cannot make namespaces here: {problem.decode(errors='replace').strip()}"

    def capabilities(self) -> Capabilities:
        """Returns what holds here: limits need control groups, users of their own need root."""
        held = controllers()
        layers = self._composer is not None and not self._composer.missing()
        return Capabilities(
            images=layers,
            memory_limit="memory" in held,
            process_limit="pids" in held,
            cpu_limit="cpu" in held,
            inode_limit=layers,
            terminal_limit=layers,
            separate_users=os.geteuid() == 0,
            pause="freezer" in held,
            network=not jail.lacking(),
            layers=layers,
            disk_file=layers,
        )

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one sandbox.

        Raises:
            PolicyError: Layers or a disk were asked for, which this machine cannot mount.
            LayerError: A layer is not there or damaged.
            RefusedError: The disk has no room.
            InfrastructureError: bwrap could not be started.
        """
        composer, layered = self._composer, bool(spec.image or spec.workspace or spec.toolkit)
        if (layered or spec.limits.disk_bytes) and (composer is None or composer.missing()):
            raise PolicyError(
                f"the bubblewrap backend has no images, layers and disks here: "
                f"{composer.missing() if composer else 'no state folder'}; or use sandbox.backend=docker"
            )
        if self._agent is AGENT and self._state_dir is not None:
            toolkit, program = self._state_dir / "toolkit", bwrap.interpreter()[0]
            self._agent = await asyncio.to_thread(build, toolkit, program)
        composed = await asyncio.to_thread(composer.acquire, spec) if composer and layered else None
        cgroup = Cgroup.create(box_id, spec.limits)
        uid = USERS.take() if os.geteuid() == 0 and not composed else None

        async def release() -> None:
            await cgroup.remove()
            if uid is not None:
                USERS.give_back(uid)
            if composer and composed:
                await asyncio.to_thread(composer.release, composed.layers)

        try:
            process = await self._spawn(box_id, cgroup, spec, composed, uid)
        except BaseException as error:
            await release()
            if isinstance(error, OSError):
                raise InfrastructureError(f"bwrap could not be started: {error}") from error
            raise
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        oom_kills = cgroup.oom_counter()

        async def kill() -> None:
            oom_kills.close()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            stdin.close()  # bwrap may have been killed before it bound the agent to its life
            await release()
            await process.wait()

        async def pause(stop: bool) -> None:
            await cgroup.freeze(stop)

        writable = None
        if composer and composed:
            box = Path(f"/proc/{process.pid}/root{composer.mounts}") / BOX
            writable = Writable(box / "upper", composed.trees)
            spec = composer.pinned(spec)
        pausing = pause if cgroup.freezes else None
        return Started(
            stdout, stdin, kill, oom_kills, pausing, lambda: cgroup.folders,
            writable=writable, spec=spec, settle=functools.partial(cgroup.settle, spec.latency),
        )  # fmt: skip

    def _door(self, box_id: str, spec: SandboxSpec) -> Path | None:
        return door_of(self._state_dir, box_id) if spec.network and self._state_dir else None

    async def _spawn(
        self, box_id: str, cgroup: Cgroup, spec: SandboxSpec, composed: Composed | None, uid: int | None
    ) -> asyncio.subprocess.Process:
        door = self._door(box_id, spec)
        if self._composer is None or self._composer.missing():
            return await _execute(cgroup.wrap(bwrap.plain(spec.limits, self._agent, None, uid, door)), None)
        places = self._composer.mounts / BOX
        if composed is None:
            command: Iterable[str] = bwrap.plain(spec.limits, self._agent, places, uid, door)
        else:
            command = bwrap.composed(spec.limits, await self._controlled(), places, composed.env, door)
        trees = composed.trees if composed else ()
        with contextlib.ExitStack() as stack:
            entering = private(self._composer.mounts, spec.limits, trees, set(cgroup.folders.values()))
            if spec.limits.disk_bytes:
                place = await asyncio.to_thread(stack.enter_context, entering)
            else:
                place = stack.enter_context(entering)
            return await _execute([*command], place)

    async def _controlled(self) -> Control:
        if self._control is None:
            assert self._state_dir is not None
            toolkit, program = self._state_dir / "toolkit", bwrap.interpreter()[0]
            self._control = await asyncio.to_thread(ensure_control, toolkit, program)
        return self._control

    async def reclaim(self, state_dir: Path) -> list[str]:
        """Sandboxes die with their node (`--die-with-parent`); groups and mounts can be left."""
        left = await asyncio.to_thread(sweep)
        if self._composer is not None:
            left += await asyncio.to_thread(self._composer.reclaim)
        return left

    async def reap(self, held: Callable[[], Set[str]]) -> list[str]:
        """Sandboxes are what runs in their control groups, of which the node's reaper takes care."""
        return []

    def leave(self) -> None:
        """Removes the node's own control group and unmounts its layers."""
        leave()
        if self._composer is not None:
            self._composer.leave()


async def _execute(command: list[str], place: Private | None) -> asyncio.subprocess.Process:
    enter: Callable[[], None] | None = place.enter if place else None
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=1 << 22,
            preexec_fn=enter,
            env={"PATH": os.environ.get("PATH", os.defpath)},  # pid 1 of a sandbox shows what it was given
        )
    except subprocess.SubprocessError as error:
        assert place is not None
        raise InfrastructureError(f"the mounts of a sandbox could not be made: {place.why()}") from error
