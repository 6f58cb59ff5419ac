"""Commands without a past: each in namespaces and folders of its own, which the kernel takes away with it.

The keeper of such a command is the first process of its namespace. When it ends, so does everything else
there, and with the last process go the mounts with their files, shared memory, semaphores and message queues.
"""

from __future__ import annotations

import os

from . import libc
from .frames import SCRATCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # without enumerations, which cost more than all else here

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000


def enter(options: str) -> None:
    """Returns in a new process, the first of new namespaces; the one that called is gone.

    Args:
        options: Of the file systems that are mounted over the scratch folders: size, inodes, mode.
    """
    libc.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID)
    if os.fork():
        os._exit(0)
    libc.mount(None, b"/", MS_REC | MS_PRIVATE, None)
    libc.mount(b"proc", b"/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    for folder in SCRATCH:
        libc.mount(b"tmpfs", folder.encode(), MS_NOSUID | MS_NODEV, options.encode())


def end_others() -> None:
    """Ends every other process of the namespace; returns when none is left."""
    while True:
        try:  # noqa: SIM105 (contextlib is not imported in a sandbox)
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
