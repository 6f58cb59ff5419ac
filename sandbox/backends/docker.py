"""The container tier: one hardened Docker container per sandbox, its main process the resident agent.

The channel is the container's attached stdin and stdout, so no command costs a call of the daemon. Containers
carry labels, and whatever a dead node left is found and removed by label alone.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any

import docker
import docker.errors
import docker.types
import requests.exceptions

from sandbox.backends.base import COMMAND_UID, Started
from sandbox.errors import InfrastructureError, ProtocolError
from sandbox.images import AGENT_PATH, ensure_image
from sandbox.types import Limits, SandboxSpec

LABEL = "tempering.node"
_OWNER = "tempering.owner"
_STREAM_HEADER = struct.Struct("!BxxxI")
_STDOUT, _STDERR = 1, 2
_UNREACHABLE = (docker.errors.DockerException, requests.exceptions.RequestException)


class Docker:
    """Starts sandboxes as containers of the local engine."""

    name = "docker"

    def __init__(self) -> None:
        self._client: docker.DockerClient | None = None
        self._image = asyncio.Lock()

    async def missing(self) -> str:
        """Returns why no engine can be used."""
        try:
            await asyncio.to_thread(self._connect)
        except _UNREACHABLE as error:
            return f"no Docker engine answers ({_first_line(error)})"
        return ""

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one container.

        Raises:
            InfrastructureError: The engine refused.
        """
        try:
            async with self._image:
                image = spec.image or await asyncio.to_thread(ensure_image, self._connect())
            container = await asyncio.to_thread(self._create, box_id, owner, spec, image)
        except _UNREACHABLE as error:
            raise InfrastructureError(f"Docker did not make the sandbox: {_first_line(error)}") from error
        try:
            sock = await asyncio.to_thread(_attach, container)
            reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 22)
            await asyncio.to_thread(container.start)
        except (*_UNREACHABLE, OSError) as error:
            await asyncio.to_thread(_remove, container)
            raise InfrastructureError(f"Docker did not start the sandbox: {_first_line(error)}") from error

        async def kill() -> None:
            writer.close()
            await asyncio.to_thread(_remove, container)

        async def oom_kills() -> int:
            return 0

        return Started(Demultiplexed(reader), writer, kill, oom_kills)

    async def reclaim(self, keep: frozenset[str]) -> list[str]:
        """Removes the containers that an earlier node left, by label."""
        try:
            return await asyncio.to_thread(self._reclaim, keep)
        except _UNREACHABLE:
            return []

    def _connect(self) -> docker.DockerClient:
        if self._client is None:
            client = docker.from_env(timeout=60)
            client.ping()
            self._client = client
        return self._client

    def _create(self, box_id: str, owner: str, spec: SandboxSpec, image: str) -> Any:
        return self._connect().containers.create(
            image,
            ["/usr/bin/python3", "-I", "-S", AGENT_PATH, str(COMMAND_UID)],
            name=f"tempering-{box_id}",
            labels={**spec.labels, LABEL: box_id.split("-")[0], _OWNER: owner},
            **_hardening(spec.limits),
        )

    def _reclaim(self, keep: frozenset[str]) -> list[str]:
        removed: list[str] = []
        for container in self._connect().containers.list(all=True, filters={"label": LABEL}):
            if container.labels.get(_OWNER) not in keep:
                _remove(container)
                removed.append(str(container.name))
        return removed


class Demultiplexed:
    """The standard output of a container out of the engine's stream of framed chunks."""

    def __init__(self, reader: asyncio.StreamReader):
        self._reader, self._pending = reader, bytearray()

    async def readexactly(self, n: int) -> bytes:
        """Reads exactly `n` bytes of standard output; standard error is dropped."""
        while len(self._pending) < n:
            kind, size = _STREAM_HEADER.unpack(await self._reader.readexactly(_STREAM_HEADER.size))
            if kind not in (_STDOUT, _STDERR):
                raise ProtocolError(f"the engine's stream has a chunk of kind {kind}")
            chunk = await self._reader.readexactly(size)
            if kind == _STDOUT:
                self._pending += chunk
        data = bytes(self._pending[:n])
        del self._pending[:n]
        return data


def _hardening(limits: Limits) -> dict[str, Any]:
    mounts = {path: _tmpfs(limits) for path in ("/tmp", "/work")}
    return {
        "stdin_open": True,
        "network_mode": "none",
        "read_only": True,
        "tmpfs": mounts,
        "working_dir": "/work",
        "user": "0:0",
        "cap_drop": ["ALL"],
        "cap_add": ["SETUID", "SETGID", "KILL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": limits.pids,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "nano_cpus": int(limits.cpus * 1e9),
        "shm_size": 1 << 20,
        "ipc_mode": "none",
        "init": True,
        "log_config": docker.types.LogConfig(type="none"),
        "ulimits": list(_ulimits(limits)),
        "environment": {},
        "hostname": "sandbox",
        "oom_score_adj": 500,
    }


def _tmpfs(limits: Limits) -> str:
    return f"rw,nosuid,nodev,mode=1777,size={limits.tmpfs_bytes},nr_inodes={limits.tmpfs_inodes}"


def _ulimits(limits: Limits) -> Iterator[docker.types.Ulimit]:
    for name, value in (("nofile", limits.open_files), ("core", 0), ("fsize", limits.tmpfs_bytes)):
        yield docker.types.Ulimit(name=name, soft=value, hard=value)


def _attach(container: Any) -> socket.socket:
    stream = container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    sock: socket.socket = stream._sock
    sock.setblocking(False)
    return sock


def _remove(container: Any) -> None:
    try:
        container.remove(force=True, v=True)
    except docker.errors.NotFound:
        return
    except docker.errors.APIError as error:
        if error.response is None or error.response.status_code != 409:  # 409: is being removed
            raise


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
