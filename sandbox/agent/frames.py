"""What agent, zygote, keeper and command tell one another, and what they all know of the sandbox."""

from __future__ import annotations

import struct
import sys
from _socket import SCM_RIGHTS, SOL_SOCKET, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Any

    Header = dict[str, Any]
else:
    import posix as os

JOB = struct.Struct("!I")
FORK = struct.Struct("!II")
STATUS = struct.Struct("!Bi")
EXITED, FAILED, DIRTY, DONE, SIGNAL, FULL, FREE, UNMADE = 0, 1, 2, 3, 4, 5, 6, 7
DIRECT, FOLDERS = 1 << 15, 16
"""Of a job that goes to its keeper at once: at most so many bytes, and folders to look for the program in."""

MACHINE = "x86_64"
"""Where programs are started without a fork: whose machine code `spawn.py` has."""

UNKNOWN = -(1 << 16)
CHUNK, SMALL = 1 << 16, 1 << 14
SCRATCH = ("/tmp", "/workspace", "/dev/shm")


class Outgoing:
    """What waits for the agent's channel, in the parts in which it came: large ones are held once."""

    def __init__(self, channel: int):
        self.channel, self.size = channel, 0
        self.parts: list[memoryview] = []

    def add(self, *parts: bytes | bytearray) -> None:
        """Queues bytes; those of small parts go out in one piece."""
        size = sum(map(len, parts))
        self.parts += [memoryview(part) for part in (parts if size > SMALL else (b"".join(parts),)) if part]
        self.size += size

    def flush(self) -> bool:
        """Writes what the channel takes; returns whether somebody is there to read it."""
        try:
            while self.parts:
                done = os.write(self.channel, self.parts[0])
                self.size -= done
                if done == len(self.parts[0]):
                    del self.parts[0]
                else:
                    self.parts[0] = self.parts[0][done:]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return True


def send(to: socket, data: bytes, fds: list[int]) -> None:
    """Sends a message with descriptors."""
    to.sendmsg([data], [(SOL_SOCKET, SCM_RIGHTS, struct.pack(str(len(fds)) + "i", *fds))])


def spawns() -> bool:
    """Whether `spawn.py` knows this machine's code."""
    return sys.platform == "linux" and os.uname().machine == MACHINE and sys.maxsize > 1 << 32
