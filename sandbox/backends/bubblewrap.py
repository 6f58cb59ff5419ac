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
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from sandbox.backends import bwrap
from sandbox.backends.base import Started
from sandbox.backends.cgroups import Cgroup, controllers, leave, sweep
from sandbox.backends.launch import Launch
from sandbox.backends.users import USERS
from sandbox.egress import jail
from sandbox.egress.doors import door_of
from sandbox.errors import InfrastructureError, PolicyError
from sandbox.layers.built_in import Control, ensure_control
from sandbox.layers.compose import Composed, Composer
from sandbox.layers.writable import BOX, Private, Writable, private
from sandbox.toolkit import AGENT, build
from sandbox.types import Capabilities, SandboxSpec

_ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath)}
"""Pid 1 of a sandbox shows what it was given."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The groups of a sandbox, the process in them that waits to become it, and the user of its commands."""

    cgroup: Cgroup
    launch: Launch
    uid: int | None

    async def release(self) -> None:
        """Lets go of what is not a process; what is left in the groups ends."""
        await self.undo(self.cgroup, self.uid)

    @staticmethod
    async def undo(cgroup: Cgroup, uid: int | None) -> None:
        """Removes groups, and gives the user back."""
        await cgroup.remove()
        if uid is not None:
            USERS.give_back(uid)


class Bubblewrap:
    """Starts sandboxes with `bwrap`."""

    name = "bubblewrap"

    def __init__(self, state_dir: Path | None = None, composer: Composer | None = None) -> None:
        self._state_dir = state_dir
        self._composer = composer or (Composer(state_dir) if state_dir else None)
        self._agent = AGENT
        self._control: Control | None = None
        self._ahead: dict[str, asyncio.Task[_Ahead]] = {}

    async def missing(self) -> str:
        """Returns what this machine lacks; tries a sandbox for real, as kernels may forbid namespaces."""
        if not bwrap.program():
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
            own_users=os.geteuid() == 0,
            masked_kernel=True,
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
        composed = await asyncio.to_thread(composer.acquire, spec) if composer and layered else None
        launching = self._ahead.pop(box_id, None)
        ahead: _Ahead | None = None

        async def release() -> None:
            if ahead is not None:
                await ahead.release()
            if composer and composed:
                await asyncio.to_thread(composer.release, composed.layers)

        try:
            ahead = await (launching or self._launch(box_id, spec, composed))
            channel = await ahead.launch.go()
        except BaseException:
            if ahead:
                await ahead.launch.end()
            await release()
            raise
        cgroup, launch = ahead.cgroup, ahead.launch
        oom_kills = cgroup.oom_counter()

        async def kill() -> None:
            oom_kills.close()
            launch.kill()
            channel.close()  # bwrap may have been killed before it bound the agent to its life
            await release()
            await launch.wait()

        async def pause(stop: bool) -> None:
            await cgroup.freeze(stop)

        writable = None
        if composer and composed:
            box = Path(f"/proc/{launch.pid}/root{composer.mounts}") / BOX
            writable = Writable(box / "upper", composed.trees)
            spec = composer.pinned(spec)
        pausing = pause if cgroup.freezes else None
        return Started(
            channel, kill, oom_kills, pausing, lambda: cgroup.folders,
            writable=writable, spec=spec, settle=functools.partial(cgroup.settle, spec.latency),
        )  # fmt: skip

    def _door(self, box_id: str, spec: SandboxSpec) -> Path | None:
        return door_of(self._state_dir, box_id) if spec.network and self._state_dir else None

    def prepares(self, spec: SandboxSpec) -> bool:
        """Whether its root is the machine's own, and its places are in memory."""
        return not (spec.image or spec.workspace or spec.toolkit or spec.limits.disk_bytes or spec.network)

    async def prepare(self, box_id: str, spec: SandboxSpec) -> None:
        """Makes all of a sandbox but its agent: groups, mounts, namespaces, a process that waits there."""
        launching = asyncio.create_task(self._launch(box_id, spec, None))
        self._ahead[box_id] = launching
        await asyncio.shield(launching)

    async def drop(self, box_id: str) -> None:
        """Undoes what was prepared under a name, if that has not been started."""
        if (launching := self._ahead.pop(box_id, None)) is not None:
            with contextlib.suppress(InfrastructureError):
                ahead = await launching
                await ahead.launch.end()
                await ahead.release()

    async def _launch(self, box_id: str, spec: SandboxSpec, composed: Composed | None) -> _Ahead:
        limits, trees = spec.limits, composed.trees if composed else ()
        if self._agent is AGENT and self._state_dir is not None:
            toolkit, program = self._state_dir / "toolkit", bwrap.interpreter()[0]
            self._agent = await asyncio.to_thread(build, toolkit, program)
        uid = USERS.take() if os.geteuid() == 0 and not composed else None
        cgroup = Cgroup.create(box_id, limits)
        try:
            command = await self._command(box_id, spec, composed, uid)
            with contextlib.ExitStack() as stack:
                enter = cgroup.enter
                if self._composer is not None and not self._composer.missing():
                    making = private(self._composer.mounts, limits, trees)
                    if limits.disk_bytes:
                        place = await asyncio.to_thread(stack.enter_context, making)
                    else:
                        place = stack.enter_context(making)
                    enter = functools.partial(_enter, cgroup, place)
                launch = Launch.fork(command, _ENVIRONMENT, enter)
                await launch.entered()
        except BaseException as error:
            await _Ahead.undo(cgroup, uid)
            if isinstance(error, OSError):
                raise InfrastructureError(f"a sandbox could not be started: {error}") from error
            raise
        return _Ahead(cgroup, launch, uid)

    async def _command(
        self, box_id: str, spec: SandboxSpec, composed: Composed | None, uid: int | None
    ) -> list[str]:
        door = door_of(self._state_dir, box_id) if spec.network and self._state_dir else None
        if self._composer is None or self._composer.missing():
            return [*bwrap.plain(spec.limits, self._agent, None, uid, door)]
        places = self._composer.mounts / BOX
        if composed is None:
            return [*bwrap.plain(spec.limits, self._agent, places, uid, door)]
        return [*bwrap.composed(spec.limits, await self._controlled(), places, composed.env, door)]

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


def _enter(cgroup: Cgroup, place: Private) -> None:
    cgroup.enter()  # before anything runs, so that nothing runs outside
    place.enter()
