"""Numbers for the users of commands: each sandbox has its own.

The kernel counts some things by user alone, beyond any namespace and control group: watches of files, pending
signals, bytes of message queues, pages of pipes, descriptors in flight, locked memory. With one user for all,
a sandbox that takes all of one of them would leave its siblings nothing.
"""

from __future__ import annotations

import os

_FIRST, _SIZE, _RANGE, _PROCESSES = 1 << 20, 1 << 9, 1 << 19, 1 << 11


class Users:
    """Ranges of `_SIZE` numbers: the first of each is that of commands, the others of Python calls.

    Every node has a part of the numbers of its own, by its process id.
    """

    def __init__(self, process: int = 0) -> None:
        self._next = _FIRST + (process or os.getpid()) % _PROCESSES * _RANGE
        self._free: list[int] = []

    def take(self) -> int:
        """Returns the first number of a range that no other sandbox of this node has."""
        if self._free:
            return self._free.pop()
        self._next += _SIZE
        return self._next - _SIZE

    def give_back(self, uid: int) -> None:
        """Takes back what `take` gave; nothing runs as one of its users any more."""
        self._free.append(uid)


USERS = Users()
"""Of this process."""
