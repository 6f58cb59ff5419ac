"""The container tier: one hardened Docker container per sandbox, its main process the resident agent.

The channel is a Unix socket that the agent opens before anything else runs: nothing of the engine lies
between node and agent, and neither an engine that is slow nor one that dies holds up a command. When the
node dies the agent ends with its channel, and the engine removes the container; what stays for another reason
carries labels, by which the next node finds and removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Set
from pathlib import Path
from typing import Any, cast

import docker
import docker.errors
import docker.types
import docker.utils
import requests.exceptions

from sandbox.backends import cgroups
from sandbox.backends.base import (
    CHANNEL,
    COMMAND_UID,
    DOOR,
    Started,
    Unprepared,
    agent_command,
    refuse_layers,
)
from sandbox.backends.users import USERS
from sandbox.egress import doors, jail
from sandbox.errors import InfrastructureError, PolicyError
from sandbox.frames import FrameProtocol
from sandbox.images import AGENT_FOLDER, ImageError, ensure_image
from sandbox.layers.compose import Composer
from sandbox.layers.containers import ContainerRoots, Layered
from sandbox.types import Capabilities, Limits, SandboxSpec

STATE_DIR, OWNER, BOX = "tempering.state_dir", "tempering.owner", "tempering.sandbox"
_CALL_S, _LOOK_S = 60.0, 1.0
_FREEZES, _FREEZE_RETRY_S = 5, 0.05
_POOLS = 64
"""The client keeps a pool of connections for each address, and closes the oldest under who still uses it."""

_HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
"""What the engine writes itself only for a container that it gives a network."""

_LEAST_SHARES = 2
"""The least weight of a container, 1024 as a rule; with version 2 the engine sets `cpu.weight` 1."""

_UNREACHABLE = (docker.errors.DockerException, requests.exceptions.RequestException)


class Docker(Unprepared):
    """Starts sandboxes as containers of the local engine, for the node of one state folder."""

    name = "docker"

    def __init__(self, state_dir: Path | None = None, composer: Composer | None = None) -> None:
        self._state_dir, self._composer = state_dir, composer
        self._roots = ContainerRoots(composer, state_dir / "toolkit") if composer and state_dir else None
        self._client: Any = None
        self._image: str = ""
        self._remapped = False
        self._channels = state_dir / "channels" if state_dir else None
        self._making = asyncio.Lock()

    async def missing(self) -> str:
        """Returns why no engine can be used."""
        try:
            await asyncio.to_thread(self._connect)
        except _UNREACHABLE as error:
            return f"no Docker engine answers ({_first_line(error)})"
        except OSError as error:
            return f"the node cannot write what its containers are shown: {error}"
        if not str(self._client.api.base_url).startswith("http+docker://"):
            return "the engine is not of this machine: sandboxes need one behind a Unix socket (DOCKER_HOST)"
        return ""

    def capabilities(self) -> Capabilities:
        """Returns what a container holds; one with users of its own cannot reach the door to a network."""
        return Capabilities(
            images=True,
            memory_limit=True,
            process_limit=True,
            cpu_limit=True,
            inode_limit=True,
            separate_users=True,
            own_users=True,
            pause=True,
            network=not jail.lacking() and not self._remapped,
            layers=self._composer is not None and not self._composer.missing(),
        )

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one container.

        Raises:
            PolicyError: A disk was asked for, or layers that do not go together or cannot be mounted here, or
                the engine does not have the image.
            LayerError: A layer is not there or damaged.
            InfrastructureError: The engine refused.
        """
        refuse_layers(self.name, SandboxSpec(limits=spec.limits) if self._roots else spec, images=True)
        container: Any = None
        layered: Layered | None = None
        uid = USERS.take()
        try:
            layered = await self._layered(box_id, spec)
            await asyncio.to_thread(self._connect)
            with _listening(self._channel(box_id)) as listener:
                container = await self._container(box_id, owner, spec, layered, uid)
                await asyncio.to_thread(container.start)
                channel = await _called(listener, container)
        except BaseException as error:
            if container is not None:
                with contextlib.suppress(*_UNREACHABLE):  # then the reaper finds it when the engine is back
                    await asyncio.to_thread(_remove, container)
            USERS.give_back(uid)
            if layered is not None:
                await asyncio.to_thread(layered.release)
            if not isinstance(error, (*_UNREACHABLE, OSError, ImageError)):
                raise
            raise InfrastructureError(f"Docker did not start the sandbox: {_first_line(error)}") from error
        groups = await asyncio.to_thread(_groups, container)
        oom_kills = cgroups.OomCounter(groups.get("memory"))
        with contextlib.suppress(OSError):  # of version 2, or of an engine elsewhere
            if "memory" in groups:
                (groups["memory"] / cgroups.SOCKETS).write_text(str(spec.limits.memory_bytes))

        async def kill() -> None:
            channel.close()
            oom_kills.close()
            with contextlib.suppress(
                *_UNREACHABLE
            ):  # the agent ends with its channel, and the container then
                await asyncio.to_thread(_remove, container)
                USERS.give_back(uid)
            if layered is not None:
                await asyncio.to_thread(layered.release)

        frozen = cgroups.Cgroup(dict(groups))

        async def pause(stop: bool) -> None:
            """By the kernel itself where that can be: the engine runs a program for it."""
            if frozen.freezes:
                await frozen.freeze(stop)
                return
            try:
                await asyncio.to_thread(_freeze, container, stop)
            except _UNREACHABLE as error:
                what = f"Docker did not {'pause' if stop else 'resume'}: {_first_line(error)}"
                raise InfrastructureError(what) from error

        async def settle() -> None:
            if spec.latency == "best_effort":
                try:
                    await asyncio.to_thread(container.update, cpu_shares=_LEAST_SHARES)
                except _UNREACHABLE as error:
                    raise InfrastructureError(f"Docker gave no weight: {_first_line(error)}") from error

        writable, started = (layered.writable, layered.spec) if layered else (None, None)
        return Started(
            channel, kill, oom_kills, pause, lambda: groups,
            writable=writable, spec=started, settle=settle,
        )  # fmt: skip

    async def reclaim(self, state_dir: Path) -> list[str]:
        """Removes the containers that an earlier node of this folder left, by label."""
        try:
            return await asyncio.to_thread(self._reclaim, state_dir)
        except _UNREACHABLE:
            return []

    async def reap(self, held: Callable[[], Set[str]]) -> list[str]:
        """Removes the containers of this node, by label, that are not held."""
        if self._client is None:
            return []
        try:
            there = await asyncio.to_thread(self._labelled)
            mounted = self._roots.places() if self._roots else []
            stray = {box: container for box, container in there.items() if box not in held()}
            for container in stray.values():
                await asyncio.to_thread(self._remove_by_id, container)
            for place in mounted:
                if self._roots and place not in held():
                    await asyncio.to_thread(self._roots.unmount, place)
        except _UNREACHABLE as error:
            raise InfrastructureError(f"Docker did not list or remove: {_first_line(error)}") from error
        return sorted(stray)

    def _remove_by_id(self, container: str) -> None:
        with contextlib.suppress(docker.errors.NotFound):
            _remove(self._connect().containers.get(container))

    def _labelled(self) -> dict[str, str]:
        """Returns the ids of the containers of this node, by sandbox."""
        label = f"{STATE_DIR}={self._state_dir}"
        found = self._connect().api.containers(all=True, filters={"label": label})
        return {str(one["Labels"][BOX]): str(one["Id"]) for one in found if BOX in one["Labels"]}

    def leave(self) -> None:
        """Closes the connection to the engine."""
        if self._client is not None:
            self._client.close()

    async def _layered(self, box_id: str, spec: SandboxSpec) -> Layered | None:
        if self._roots is None or not await asyncio.to_thread(self._roots.wanted, spec):
            return None
        connection, image = await asyncio.to_thread(self._connect), spec.image or await self._built_in()
        return await asyncio.to_thread(self._roots.prepare, connection, box_id, spec, image)

    async def _container(
        self, box_id: str, owner: str, spec: SandboxSpec, layered: Layered | None, uid: int
    ) -> Any:
        async def create(image: str, layered: Layered | None) -> Any:
            return await asyncio.to_thread(self._create, box_id, owner, spec, uid, image, layered)

        if layered is not None:
            return await create(layered.image, layered)
        try:
            return await create(spec.image or await self._built_in(), None)
        except docker.errors.ImageNotFound as error:
            if spec.image:
                raise PolicyError(
                    f"the engine has no image {spec.image!r}: docker pull it, or load it"
                ) from error
        except docker.errors.APIError as error:
            if not spec.image or "invalid reference" not in str(error.explanation):
                raise
            raise PolicyError(f"{spec.image!r} is not the name of an image") from error
        self._image = ""  # somebody has removed it
        return await create(await self._built_in(), None)

    async def _built_in(self) -> str:
        async with self._making:
            if not self._image:
                self._image = await asyncio.to_thread(ensure_image, self._connect())
            return self._image

    def _connect(self) -> Any:
        if self._client is None:
            where: Any = docker.utils.kwargs_from_env()
            client: Any = docker.DockerClient(timeout=60, num_pools=_POOLS, **where)
            client.ping()
            security = str(client.info().get("SecurityOptions"))
            self._remapped = "name=userns" in security or "name=rootless" in security
            if self._remapped and self._channels is not None:  # it cannot go through folders that are ours
                self._channels = Path(tempfile.mkdtemp(prefix="tempering-")) / "channels"
                self._channels.mkdir()
                for folder in (self._channels, self._channels.parent):
                    folder.chmod(0o711)
            if self._channels is not None:
                _put(_hosts_of(self._channels), _HOSTS)
            self._client = client
        return self._client

    def _create(
        self, box_id: str, owner: str, spec: SandboxSpec, uid: int, image: str, layered: Layered | None
    ) -> Any:
        network, settings = bool(spec.network), hardening(spec.limits)
        if layered is not None:
            uid = COMMAND_UID  # to whom the files of layers belong
            if layered.writable is not None:
                del settings["tmpfs"]["/workspace"]
        env = layered.env if layered else {}
        agent = agent_command(
            AGENT_FOLDER, spec.limits, uid=uid, alone=False, network=network, env=env, channel=True
        )
        return self._connect().containers.create(
            image,
            [*(layered.interpreter if layered else ["/usr/bin/python3"]), *agent],
            volumes=layered.volumes if layered else {},
            mounts=[*self._mounts(box_id, network)],
            name=f"tempering-{box_id}",
            labels={**spec.labels, STATE_DIR: str(self._state_dir), OWNER: owner, BOX: box_id},
            **settings,
        )

    def _channel(self, box_id: str) -> Path:
        assert self._channels is not None, "a backend without a state folder only looks around"
        return self._channels / box_id

    def _mounts(self, box_id: str, network: bool) -> Iterator[docker.types.Mount]:
        assert self._channels is not None and self._state_dir is not None
        places = {CHANNEL: self._channel(box_id), "/etc/hosts": _hosts_of(self._channels)}
        if network:
            places[DOOR] = doors.door_of(self._state_dir, box_id)
        for target, source in places.items():
            yield docker.types.Mount(target, str(source), type="bind", read_only=True)

    def _reclaim(self, state_dir: Path) -> list[str]:
        removed: list[str] = []
        for container in self._connect().containers.list(
            all=True, filters={"label": f"{STATE_DIR}={state_dir}"}, ignore_removed=True
        ):
            _remove(container)
            removed.append(str(container.name))
        if self._roots is not None:
            removed += self._roots.reclaim(self._connect())
        return removed


def hardening(limits: Limits) -> dict[str, Any]:
    """Returns the settings of a container for untrusted code, as arguments of `containers.create`.

    The agent is root of the container with the capabilities to change user and to kill, and no others;
    commands run as other users, without any.
    """
    return {
        "auto_remove": True,
        "network_mode": "none",
        "network_disabled": True,  # as empty a namespace, for which the engine runs no program
        "read_only": True,
        "tmpfs": {path: _tmpfs(limits) for path in ("/tmp", "/workspace")},
        "working_dir": "/workspace",
        "user": "0:0",
        "cap_drop": ["ALL"],
        "cap_add": ["SETUID", "SETGID", "KILL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": limits.pids,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "nano_cpus": int(limits.cpus * 1e9),
        "shm_size": limits.tmpfs_bytes,
        "log_config": docker.types.LogConfig(type="none"),
        "ulimits": list(_ulimits(limits)),
        "environment": {},
        "hostname": "sandbox",
        "oom_score_adj": 500,
    }


def _tmpfs(limits: Limits) -> str:
    return f"rw,exec,nosuid,nodev,mode=1777,size={limits.tmpfs_bytes},nr_inodes={limits.tmpfs_inodes}"


def _ulimits(limits: Limits) -> Iterator[docker.types.Ulimit]:
    for name, value in (("nofile", max(limits.open_files, 1024)), ("core", 1), ("fsize", limits.tmpfs_bytes)):
        yield docker.types.Ulimit(name=name, soft=value, hard=value)


def _hosts_of(channels: Path) -> Path:
    return channels.with_name("hosts")


def _put(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    path.chmod(0o644)


def _freeze(container: Any, stop: bool) -> None:
    """Pauses or resumes; a runtime that cannot freeze it at once (its processes fork) is asked again."""
    for left in reversed(range(_FREEZES)):
        try:
            container.pause() if stop else container.unpause()
            return
        except docker.errors.APIError as error:
            if not left or "freeze" not in str(error):
                raise
        time.sleep(_FREEZE_RETRY_S)


@contextlib.contextmanager
def _listening(path: Path) -> Generator[socket.socket]:
    """Listens where a container finds its channel, for one caller."""
    with doors.listen(path) as listener:
        listener.setblocking(False)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


async def _called(listener: socket.socket, container: Any) -> FrameProtocol:
    """Returns the channel to the agent once it has opened it.

    Raises:
        InfrastructureError: The container has ended before.
    """
    loop, deadline = asyncio.get_running_loop(), time.monotonic() + _CALL_S
    calling = asyncio.create_task(loop.sock_accept(listener))
    while not (await asyncio.wait({calling}, timeout=_LOOK_S))[0]:
        if time.monotonic() > deadline or not await asyncio.to_thread(_runs, container):
            calling.cancel()
            raise InfrastructureError("Docker did not start the sandbox: its agent never called")
    return (await loop.create_connection(FrameProtocol, sock=calling.result()[0]))[1]


def _runs(container: Any) -> bool:
    try:
        container.reload()
    except docker.errors.NotFound:  # the engine removes it when it ends
        return False
    return container.status in ("created", "running")


def _groups(container: Any) -> dict[str, Path]:
    """Returns a container's control groups; where the engine was told another place, by its first process."""
    if found := cgroups.container_groups(str(container.id)):
        return found
    with contextlib.suppress(*_UNREACHABLE):
        container.reload()
        return cgroups.groups_of(int(container.attrs["State"]["Pid"]))
    return {}


def _remove(container: Any) -> None:
    try:
        container.remove(force=True, v=True)
    except docker.errors.NotFound:
        return
    except docker.errors.APIError as error:
        response = cast("Any", error.response)
        if response is None or response.status_code != 409:  # 409: is being removed
            raise


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
