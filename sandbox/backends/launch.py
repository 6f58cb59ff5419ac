"""A process that becomes a sandbox: forked, in its control groups and mounts, and told only then what to run.

The kernel takes longest to move a process into control groups (it waits until every core has been seen to
pass), so a launch can be made ahead of the sandbox that it is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from sandbox.errors import InfrastructureError

_ORDER, _SAY = 3, 4
_ENTERED = b"."
_LIMIT = 1 << 22


class Launch:
    """One forked child. Its standard input and output are one socket, the channel of the sandbox."""

    def __init__(self, pid: int, channel: socket.socket, order: int, said: int):
        self.pid = pid
        self._channel, self._order, self._said = channel, order, said
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @classmethod
    def fork(cls, enter: Callable[[], None]) -> Launch:
        """Forks a child that calls `enter`, and waits for its command.

        Args:
            enter: Goes where the sandbox is to be; what it raises ends the child.

        Raises:
            OSError: There is no room for a process.
        """
        ours, theirs = socket.socketpair()
        order, said = os.pipe(), os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                _wait_for_command(theirs.fileno(), order[0], said[1], enter)
        except OSError:
            ours.close()
            os.close(order[1])
            os.close(said[0])
            raise
        finally:
            theirs.close()
            os.close(order[0])
            os.close(said[1])
        ours.setblocking(False)
        return cls(pid, ours, order[1], said[0])

    async def entered(self) -> None:
        """Returns once the child is where the sandbox is to be.

        Raises:
            InfrastructureError: It could not go there; it has ended.
        """
        if (said := await self._hear()) != _ENTERED:
            await self.end()
            raise InfrastructureError(_words(said))

    async def become(
        self, command: Iterable[str], env: Mapping[str, str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Has the child execute a command (a path and its arguments), and returns the channel.

        Raises:
            InfrastructureError: It cannot be executed; the child has ended.
        """
        try:
            os.write(self._order, json.dumps([[*command], dict(env)]).encode())
            os.close(self._order)
            self._order = -1
            said = await self._hear()
        except OSError as error:
            said = str(error).encode()
        if said:
            await self.end()
            raise InfrastructureError(_words(said))
        return await asyncio.open_connection(sock=self._channel, limit=_LIMIT)

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.done()

    def kill(self) -> None:
        """Ends it; `wait` returns when that has happened."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Returns when it has ended."""
        await asyncio.shield(self._ended)
        for fd in (self._order, self._said):
            if fd >= 0:
                os.close(fd)
        self._order = self._said = -1

    async def end(self) -> None:
        """Ends it before it has become anything."""
        self._channel.close()
        self.kill()
        await self.wait()

    async def _hear(self) -> bytes:
        heard: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._said, heard.set_result, None)
        try:
            await heard
        finally:
            self._loop.remove_reader(self._said)
        return os.read(self._said, 4096)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        os.waitpid(self.pid, 0)
        self._ended.set_result(None)


def _words(said: bytes) -> str:
    return f"a sandbox could not be started: {said.decode(errors='replace') or 'its first process was ended'}"


def _wait_for_command(channel: int, order: int, say: int, enter: Callable[[], None]) -> NoReturn:
    """Runs in the child: only its own descriptors stay, so that it keeps nothing of other sandboxes open."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (channel, channel, null, order, say)]
        for target, fd in enumerate(above):
            os.dup2(fd, target, inheritable=target < _ORDER)
        os.closerange(_SAY + 1, os.sysconf("SC_OPEN_MAX"))
        enter()
        os.write(_SAY, _ENTERED)
        text = b""
        while data := os.read(_ORDER, 1 << 16):
            text += data
        if text:
            argv, env = json.loads(text)
            os.execve(argv[0], argv, env)
    except BaseException as error:
        os.write(_SAY, f"{type(error).__name__}: {error}".encode()[:4096])
    finally:
        os._exit(1)
