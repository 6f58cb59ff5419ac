"""What the agent gives up before it serves, for good and for everything that it starts."""

from __future__ import annotations

import binascii
import resource

from . import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from .frames import Header
else:
    import posix as os


def confine(config: Header) -> None:
    """Gives up, for good and for all children, new privileges and the system calls of the filter."""
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    if config["uid"] is None:
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"1000")
        os.close(score)
        libc.prctl(libc.PR_SET_DUMPABLE, 0)  # commands share the agent's user: no ptrace of it
    if config["seccomp"] and not config["fresh"]:  # then each command has it, as keepers make namespaces
        libc.filter_calls(binascii.a2b_base64(config["seccomp"]))


def forbid_cores() -> None:
    """Has no core written: by a limit of 1, as one of 0 would still have a handler of the host started."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except ValueError:  # the limit is 0 already, and only a privileged process could raise it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
