"""A process that becomes a sandbox: forked into its control groups and mounts, and let go when it is wanted.

The kernel takes longest to move a process into control groups and to change its root (it waits until every
core has been seen to pass), so a launch can be made ahead of the sandbox that it is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import NoReturn

from sandbox.errors import InfrastructureError
from sandbox.frames import FrameProtocol

GATE, _SAY = 3, 4
"""The descriptor that the command is to wait for a byte on before it runs anything that is not its own."""


class Launch:
    """One forked child. Its standard input and output are one socket, the channel of the sandbox."""

    def __init__(self, pid: int, channel: socket.socket, gate: int, said: int):
        self.pid = pid
        self._channel, self._gate, self._said = channel, gate, said
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @classmethod
    def fork(
        cls, command: list[str], env: Mapping[str, str], enter: Callable[[], None], *, gated: bool = True
    ) -> Launch:
        """Forks a child that calls `enter` and executes a command.

        Args:
            command: A path and its arguments.
            env: Its environment.
            enter: Goes where the sandbox is to be; what it raises ends the child.
            gated: Whether the command waits at its `GATE`; one that knows of none is not given any.

        Raises:
            OSError: There is no room for a process.
        """
        ours, theirs = socket.socketpair()
        gate, said = os.pipe(), os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                _become(theirs.fileno(), gate[0] if gated else -1, said[1], command, env, enter)
        except OSError:
            ours.close()
            os.close(gate[1])
            os.close(said[0])
            raise
        finally:
            theirs.close()
            os.close(gate[0])
            os.close(said[1])
        ours.setblocking(False)
        return cls(pid, ours, gate[1], said[0])

    async def entered(self) -> None:
        """Returns once the command has taken over.

        Raises:
            InfrastructureError: It could not get there; the child has ended.
        """
        if said := await self._hear():
            await self.end()
            raise InfrastructureError(f"a sandbox could not be started: {said.decode(errors='replace')}")

    async def go(self) -> FrameProtocol:
        """Opens the gate, and returns the channel."""
        os.close(self._gate)
        self._gate = -1
        return (await self._loop.create_connection(FrameProtocol, sock=self._channel))[1]

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
        for fd in (self._gate, self._said):
            if fd >= 0:
                os.close(fd)
        self._gate = self._said = -1

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


def _become(
    channel: int,
    gate: int,
    say: int,
    command: list[str],
    env: Mapping[str, str],
    enter: Callable[[], None],
) -> NoReturn:
    """Runs in the child: only its own descriptors stay, so that it keeps nothing of other sandboxes open."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        streams = (channel, channel, null, gate if gate >= 0 else null, say)
        above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in streams]
        for target, fd in enumerate(above):
            os.dup2(fd, target, inheritable=target < GATE or (target == GATE and gate >= 0))
        os.closerange(_SAY + 1, os.sysconf("SC_OPEN_MAX"))
        enter()
        os.execve(command[0], command, env)
    except BaseException as error:
        os.write(_SAY, f"{type(error).__name__}: {error}".encode()[:4096])
    finally:
        os._exit(1)
