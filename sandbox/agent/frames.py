"""What agent, zygote, keeper and command tell one another, and what they all know of the sandbox."""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Header = dict[str, Any]

JOB = struct.Struct("!I")
FORK = struct.Struct("!II")
STATUS = struct.Struct("!Bi")
EXITED, FAILED, DIRTY, DONE, SIGNAL, FULL, FREE = 0, 1, 2, 3, 4, 5, 6
UNKNOWN = -(1 << 16)
CHUNK = 1 << 16
SCRATCH = ("/tmp", "/workspace", "/dev/shm")
