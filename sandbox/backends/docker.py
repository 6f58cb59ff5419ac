"""The container tier: one hardened Docker container per sandbox, its main process the resident agent.

The channel is the container's attached stdin and stdout, so no command costs a call of the daemon. When the
node dies the daemon closes the container's stdin, the agent ends, and the daemon removes the container;
what stays for another reason carries labels, by which the next node finds and removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import docker
import docker.errors
import docker.types
import requests.exceptions

from sandbox.backends import cgroups
from sandbox.backends.base import Started, agent_command
from sandbox.backends.users import USERS
from sandbox.errors import InfrastructureError, ProtocolError
from sandbox.images import AGENT_FOLDER, ImageError, ensure_image
from sandbox.types import Capabilities, Limits, SandboxSpec

STATE_DIR, OWNER, BOX = "tempering.state_dir", "tempering.owner", "tempering.sandbox"
_STREAM_HEADER = struct.Struct("!BxxxI")
_STDOUT, _STDERR = 1, 2
_MAX_CHUNK, _MAX_STDERR = 1 << 20, 1 << 20
_LEAST_SHARES = 2
"""The least weight, of which a container has 1024 as a rule; the engine makes it `cpu.weight` 1 in version 2."""

_UNREACHABLE = (docker.errors.DockerException, requests.exceptions.RequestException)


class Docker:
    """Starts sandboxes as containers of the local engine, for the node of one state folder."""

    name = "docker"

    def __init__(self, state_dir: Path | None = None) -> None:
        self._state_dir = state_dir
        self._client: Any = None
        self._image: str = ""
        self._making = asyncio.Lock()

    async def missing(self) -> str:
        """Returns why no engine can be used."""
        try:
            await asyncio.to_thread(self._connect)
        except _UNREACHABLE as error:
            return f"no Docker engine answers ({_first_line(error)})"
        return ""

    def capabilities(self) -> Capabilities:
        """Returns what a container holds: everything."""
        return Capabilities(
            images=True,
            memory_limit=True,
            process_limit=True,
            cpu_limit=True,
            inode_limit=True,
            separate_users=True,
            pause=True,
        )

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one container.

        Raises:
            InfrastructureError: The engine refused.
        """
        container: Any = None
        uid = USERS.take()
        try:
            image = spec.image or await self._built_in()
            container = await asyncio.to_thread(self._create, box_id, owner, spec, image, uid)
            stream = await asyncio.to_thread(_attach, container)
            reader, writer = await asyncio.open_connection(sock=_socket_of(stream), limit=1 << 22)
            await asyncio.to_thread(container.start)
        except (*_UNREACHABLE, OSError, ImageError) as error:
            if container is not None:
                await asyncio.to_thread(_remove, container)
            USERS.give_back(uid)
            raise InfrastructureError(f"Docker did not start the sandbox: {_first_line(error)}") from error
        group = _memory_group(str(container.id))
        oom_kills = cgroups.OomCounter(group)
        with contextlib.suppress(OSError):  # of version 2, or of an engine elsewhere
            (group / cgroups.SOCKETS).write_text(str(spec.limits.memory_bytes))

        async def kill() -> None:
            writer.close()
            oom_kills.close()
            with contextlib.suppress(
                *_UNREACHABLE
            ):  # the agent ends with its channel, and the container then
                await asyncio.to_thread(_remove, container)
                USERS.give_back(uid)
            stream.close()

        async def pause(stop: bool) -> None:
            try:
                await asyncio.to_thread(container.pause if stop else container.unpause)
            except _UNREACHABLE as error:
                raise InfrastructureError(f"Docker did not pause or resume: {_first_line(error)}") from error

        return Started(Demultiplexed(reader), writer, kill, oom_kills, pause)

    async def reclaim(self, state_dir: Path) -> list[str]:
        """Removes the containers that an earlier node of this folder left, by label."""
        try:
            return await asyncio.to_thread(self._reclaim, state_dir)
        except _UNREACHABLE:
            return []

    def leave(self) -> None:
        """Closes the connection to the engine."""
        if self._client is not None:
            self._client.close()

    async def _built_in(self) -> str:
        async with self._making:
            if not self._image:
                self._image = await asyncio.to_thread(ensure_image, self._connect())
            return self._image

    def _connect(self) -> Any:
        if self._client is None:
            client: Any = docker.from_env(timeout=60)
            client.ping()
            self._client = client
        return self._client

    def _create(self, box_id: str, owner: str, spec: SandboxSpec, image: str, uid: int) -> Any:
        return self._connect().containers.create(
            image,
            ["/usr/bin/python3", *agent_command(AGENT_FOLDER, spec.limits, uid=uid, alone=False)],
            name=f"tempering-{box_id}",
            labels={**spec.labels, STATE_DIR: str(self._state_dir), OWNER: owner, BOX: box_id},
            cpu_shares=_LEAST_SHARES if spec.latency == "best_effort" else 1024,
            **hardening(spec.limits),
        )

    def _reclaim(self, state_dir: Path) -> list[str]:
        removed: list[str] = []
        for container in self._connect().containers.list(
            all=True, filters={"label": f"{STATE_DIR}={state_dir}"}, ignore_removed=True
        ):
            _remove(container)
            removed.append(str(container.name))
        return removed


class Demultiplexed:
    """The standard output of a container out of the engine's stream of framed chunks."""

    def __init__(self, reader: asyncio.StreamReader):
        self._reader, self._pending = reader, bytearray()
        self._dropped = 0

    async def readexactly(self, n: int) -> bytes:
        """Reads exactly `n` bytes of standard output; standard error is dropped.

        Raises:
            ProtocolError: The stream is not one of the engine's chunks, or floods standard error.
        """
        while len(self._pending) < n:
            kind, size = _STREAM_HEADER.unpack(await self._reader.readexactly(_STREAM_HEADER.size))
            if kind not in (_STDOUT, _STDERR) or size > _MAX_CHUNK:
                raise ProtocolError(f"the engine's stream has a chunk of kind {kind} and {size} bytes")
            chunk = await self._reader.readexactly(size)
            if kind == _STDOUT:
                self._pending += chunk
            elif (dropped := self._dropped + size) > _MAX_STDERR:
                raise ProtocolError(f"the agent wrote {dropped} bytes to its standard error")
            else:
                self._dropped = dropped
        data = bytes(self._pending[:n])
        del self._pending[:n]
        return data


def hardening(limits: Limits) -> dict[str, Any]:
    """Returns the settings of a container for untrusted code, as arguments of `containers.create`.

    The agent is root of the container with the capabilities to change user and to kill, and no others;
    commands run as other users, without any.
    """
    return {
        "stdin_open": True,
        "auto_remove": True,
        "network_mode": "none",
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
        "init": True,
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


def _attach(container: Any) -> Any:
    return container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})


def _socket_of(stream: Any) -> socket.socket:
    sock: socket.socket = stream._sock
    sock.setblocking(False)
    return sock


def _memory_group(container: str) -> Path:
    """Returns where the kernel counts the container's memory: by version and driver of control groups."""
    root = Path("/sys/fs/cgroup")
    places = (
        root / "memory/docker" / container,
        root / f"memory/system.slice/docker-{container}.scope",
        root / "docker" / container,
        root / f"system.slice/docker-{container}.scope",
    )
    return next((place for place in places if place.exists()), places[-1])


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
