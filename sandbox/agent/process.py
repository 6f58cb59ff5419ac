"""A process in the background: it outlives the request that started it, and keeps the end of its output."""

from __future__ import annotations

import struct
import time
from _socket import socket

from .command import GRACE_S, Command, Launched
from .frames import CHUNK, SIGNAL, STATUS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Any

    from .frames import Header
else:
    import posix as os

MAX_INPUT = 1 << 20
MAX_TURNS = 1024
HOLD_S = 30.0
"""How long a process waits for a reader that takes all of its output, before the oldest goes."""

FOREVER = float("inf")


class Poll:
    """A request that waits for output or for the end."""

    def __init__(self, header: Header):
        self.id, self.offset, self.limit = int(header["id"]), int(header["offset"]), int(header["limit"])
        self.deadline = time.monotonic() + header["wait_s"]


class Process(Command):
    """A command without a deadline, whose output is asked for by its place in the stream."""

    def __init__(self, header: Header, text: bytes, stdin: bytes, launched: Launched):
        super().__init__({**header, "limit": 1, "stream": False}, text, stdin, launched)
        self.keep, self.log, self.start = int(header["limit"]), bytearray(), 0
        self.polls: list[Poll] = []
        self.turns: list[list[int]] = []
        self.seen, self.asked, self.freed = 0, self.started, 0.0
        self.closing = bool(header.get("eof"))
        self.deadline = self.started + header["life_s"] if header.get("life_s") else FOREVER
        if self.extra_fd >= 0:  # a terminal: its master is where all goes, once the job is through
            os.set_blocking(self.extra_fd, False)

    def outputs(self) -> list[int]:
        """Returns the descriptors of open output streams."""
        return [fd for fd in (self.out_fd, self.err_fd, self.extra_fd) if fd >= 0]

    def wake_at(self) -> float:
        """Returns when something is to be done although nothing was heard."""
        held = self.asked + HOLD_S if self.full(time.monotonic()) else 0.0
        ended = max(self.ended_at, self.freed) + GRACE_S if self.ended_at and self.outputs() else FOREVER
        times = [max(ended, held), FOREVER if self.ended_at else self.deadline, held or FOREVER]
        return min([*times, *(poll.deadline for poll in self.polls)])

    def finished(self, now: float) -> bool:
        """It is never reported by itself: it answers to polls."""
        return False

    def over(self, now: float) -> bool:
        """Whether its end is known and no more output comes."""
        if (self.status is None and not self.gone) or self.full(now):
            return False
        return not self.outputs() or now >= max(self.ended_at, self.freed) + GRACE_S

    def full(self, now: float) -> bool:
        """Whether no more output is taken until the reader has what there is."""
        if not self.header.get("flow") or now >= self.asked + HOLD_S:
            return False
        return self.start + len(self.log) - self.seen >= self.keep or len(self.turns) >= MAX_TURNS

    def ask(self, poll: Poll) -> None:
        """Takes a poll, by which its caller says what it has got; one for nothing only looks."""
        now = time.monotonic()
        if poll.limit:
            full = self.full(now)
            self.seen, self.asked = max(self.seen, min(poll.offset, self.start + len(self.log))), now
            if full:
                self.trim()
                self.freed = now
        self.polls.append(poll)

    def drain(self, fd: int) -> bytes:
        """Takes output; what is beyond the limit goes from the front."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return b""
        except OSError:  # a terminal that nobody has open any more
            data = b""
        if not data:
            self.shut("out_fd" if fd == self.out_fd else "err_fd" if fd == self.err_fd else "extra_fd")
        self.add(data, int(fd == self.err_fd))
        return b""

    def say(self, text: bytes) -> None:
        """Takes what it would have said itself."""
        self.add(text, 1)

    def add(self, data: bytes, which: int) -> None:
        """Adds output to the log."""
        if self.header.get("flow") and data and (not self.turns or self.turns[-1][1] != which):
            self.turns.append([self.start + len(self.log), which])
        self.log += data
        if len(self.log) > 2 * self.keep or len(self.turns) > MAX_TURNS:
            self.trim()

    def trim(self) -> None:
        """Drops what is over the limit, and of a reader that takes all what it has."""
        over = max(len(self.log) - self.keep, 0)
        if self.header.get("flow"):
            read = min(self.seen, self.start + len(self.log)) - self.start
            if time.monotonic() < self.asked + HOLD_S:
                over = read
            elif len(self.turns) > MAX_TURNS:
                over = max(over, read, self.turns[MAX_TURNS // 2][0] - self.start)
        del self.log[:over]
        self.start += over
        while len(self.turns) > 1 and self.turns[1][0] <= self.start:
            del self.turns[0]

    def feed(self) -> None:
        """Writes input; it stays open until the caller closes it."""
        while self.stdin_fd >= 0 and self.stdin:
            try:
                self.stdin = self.stdin[os.write(self.stdin_fd, self.stdin[:CHUNK]) :]
            except BlockingIOError:
                return
            except OSError:
                self.shut("stdin_fd")
                self.stdin = self.stdin[:0]
        if self.extra_fd >= 0 and self.header.get("pty") and not self.closing and self.stdin_fd >= 0:
            self.shut("stdin_fd")
            self.stdin_fd = os.dup(self.extra_fd)
            self.header["pty"] = None
        if self.closing and not self.header.get("pty"):
            self.shut("stdin_fd")

    def write(self, data: bytes, eof: bool) -> bool:
        """Queues input; returns whether there was room."""
        if len(self.stdin) + len(data) > MAX_INPUT:
            return False
        self.stdin = memoryview(bytes(self.stdin) + data)
        self.closing = self.closing or eof
        self.feed()
        return True

    def send(self, number: int) -> None:
        """Has the keeper signal the main process and its group."""
        if not self.gone and self.status is None:
            self.keeper.send(STATUS.pack(SIGNAL, number))

    def ready(self, now: float) -> list[tuple[Poll, bytes, dict[str, Any]]]:
        """Returns the polls that can be answered now, with their answers."""
        over, end = self.over(now), self.start + len(self.log)
        answered = [p for p in self.polls if over or p.offset < end or now >= p.deadline]
        if answered:
            self.trim()
            self.polls = [p for p in self.polls if p not in answered]
        return [(poll, *self.answer(poll, over)) for poll in answered]

    def answer(self, poll: Poll, over: bool) -> tuple[bytes, dict[str, Any]]:
        """Returns output from where the poll asks for it, and the state of the process."""
        first = min(max(poll.offset, self.start), self.start + len(self.log))
        data = bytes(self.log[first - self.start :][: poll.limit])
        rest = self.start + len(self.log) > first + len(data)
        if self.header.get("flow"):
            turns = {"turns": [turn for turn in self.turns if turn[0] < first + len(data)]}
        else:
            turns = {}
        return data, {
            **turns,
            "offset": first,
            "running": not over or rest,
            "exit_code": self.status,
            "signal": self.signal,
            "failure": self.failure,
        }

    def release(self) -> socket | None:
        """Closes its descriptors; returns the keeper when what it left still runs."""
        self.shut("stdin_fd", "out_fd", "err_fd", "extra_fd")
        if self.gone:
            self.keeper.close()
            return None
        return self.keeper


def terminal(uid: int | None, rows: int, columns: int) -> tuple[int, int]:
    """Opens a terminal that belongs to the user of commands; returns its two sides."""
    if uid is not None:
        os.seteuid(uid)
    try:
        near, far = os.openpty()
    finally:
        if uid is not None:
            os.seteuid(0)
    resize(near, rows, columns)
    return near, far


def resize(fd: int, rows: int, columns: int) -> None:
    """Sets the size of a terminal, of which the programs in it hear."""
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
