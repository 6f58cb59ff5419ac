"""A command as the agent sees it: its streams, what is kept of them, and how it ended."""

from __future__ import annotations

import time
from _socket import SHUT_WR, socket

from .frames import (
    CHUNK,
    DIRTY,
    DONE,
    EXITED,
    FAILED,
    FREE,
    FULL,
    JOB,
    SCRATCH,
    STATUS,
    UNKNOWN,
    UNMADE,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from .frames import Header
else:
    import posix as os

GRACE_S = 0.2
STATE = 1 << 18


class Launched:
    """What a launch gives: our ends of the streams, the keeper's socket, and the user's place."""

    def __init__(
        self, fds: tuple[int, int, int], keeper: socket, slot: int, extra: int = -1, direct: bool = False
    ):
        self.fds, self.keeper, self.slot, self.extra = fds, keeper, slot, extra
        self.direct = direct


class Capped:
    """Keeps the head and the tail of a stream, at most `limit` bytes and a piece, and counts what it dropped.

    The tail is a list of pieces, so that bytes are neither moved nor held twice: a limit may be half of the
    sandbox's memory.
    """

    def __init__(self, limit: int):
        self.head, self.tail = bytearray(), list[bytearray]()
        self.half, self.held, self.dropped = max(limit // 2, 1), 0, 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes, and lets go of pieces that are over the limit."""
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if not data:
            return
        if self.tail and len(self.tail[-1]) + len(data) <= CHUNK:
            self.tail[-1] += data
        else:
            self.tail.append(bytearray(data))
        self.held += len(data)
        while self.held - len(self.tail[0]) >= self.half:
            self.drop(len(self.tail[0]))

    def drop(self, size: int) -> None:
        """Drops bytes of the oldest piece."""
        del self.tail[0][:size]
        if not self.tail[0]:
            del self.tail[0]
        self.held -= size
        self.dropped += size

    def parts(self) -> list[bytes | bytearray]:
        """Returns what was kept, with a note in place of what was dropped."""
        if self.held > self.half:
            self.drop(self.held - self.half)
        note = [b"\n[... %d bytes dropped ...]\n" % self.dropped] if self.dropped else []
        return [self.head, *note, *self.tail]


class Command:
    """A running command: its streams, the socket of its keeper, and its deadline."""

    def __init__(self, header: Header, text: bytes, stdin: bytes, launched: Launched):
        self.header, self.text, self.input, self.direct = header, text, stdin, launched.direct
        self.id, self.keeper, self.slot = int(header["id"]), launched.keeper, launched.slot
        self.stdin_fd, self.out_fd, self.err_fd = launched.fds
        self.extra_fd = launched.extra
        self.stdin = memoryview(stdin if self.direct else JOB.pack(len(text)) + text + stdin)
        self.out, self.err, self.extra = Capped(header["limit"]), Capped(header["limit"]), Capped(STATE)
        self.stream, self.sent = bool(header.get("stream")), [0, 0]
        self.started = time.monotonic()
        self.deadline = self.started + header["timeout_s"]
        self.status: int | None = None
        self.signal: int | None = None
        self.failure = 0
        self.ended_at = 0.0
        self.timed_out = self.cancelled = self.stopping = self.gone = self.dirty = self.disk_full = False
        self.free = False

    def outputs(self) -> list[int]:
        """Returns the descriptors of open output streams."""
        return [fd for fd in (self.out_fd, self.err_fd) if fd >= 0]

    def wake_at(self) -> float:
        """Returns when something is to be done although nothing was heard."""
        return self.ended_at + GRACE_S if self.ended_at else self.deadline

    def finished(self, now: float) -> bool:
        """Whether to report: the tree is gone, or the main process is and a child only holds its streams."""
        if not self.gone and (self.status is None or self.stopping or self.slot):
            return False
        return (self.out_fd < 0 and self.err_fd < 0) or now >= self.ended_at + GRACE_S

    def stop(self) -> None:
        """Asks the keeper to end the tree; its end of the socket closes when all is gone."""
        if not self.stopping and not self.gone:
            self.stopping = True
            self.keeper.shutdown(SHUT_WR)

    def hear(self) -> None:
        """Takes what the keeper says: how the main process ended, and by its end that all did."""
        data = self.keeper.recv(STATUS.size)
        if not data:
            self.gone = True
        else:
            kind, value = STATUS.unpack(data)
            if kind in (EXITED, DONE, DIRTY, FREE) and value != UNKNOWN:
                self.status, self.signal = (value, None) if value >= 0 else (128 - value, -value)
            self.failure = value if kind == FAILED else self.failure
            if kind == UNMADE:
                self.say(self.unmade(value))
            self.dirty = self.dirty or kind == DIRTY
            self.disk_full = self.disk_full or kind == FULL
            self.gone = kind in (DONE, DIRTY, FREE)
            self.free = kind == FREE and not self.stopping  # who was asked to end does not go on
        self.ended_at = self.ended_at or time.monotonic()

    def say(self, text: bytes) -> None:
        """Takes what it would have said itself."""
        self.err.feed(text)

    def unmade(self, problem: int) -> bytes:
        """Returns what is said of a program that could not be started, or of its folder if below 0."""
        path = self.header["argv"][0] if problem > 0 else self.header.get("cwd", "/workspace")
        error = OSError(abs(problem), os.strerror(abs(problem)), path)
        return (type(error).__name__ + ": " + str(error) + "\n").encode()

    def feed(self) -> None:
        """Writes standard input; a command that does not read it loses it."""
        try:
            if self.stdin:
                self.stdin = self.stdin[os.write(self.stdin_fd, self.stdin[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.stdin = self.stdin[:0]
        if not self.stdin:
            self.shut("stdin_fd")

    def drain(self, fd: int) -> bytes:
        """Reads an output stream; returns what is to be sent ahead of the result."""
        data = read_some(fd)
        if not data:
            self.shut("out_fd" if fd == self.out_fd else "err_fd" if fd == self.err_fd else "extra_fd")
        elif fd == self.extra_fd:
            self.extra.feed(data)
        else:
            return self.take(data, int(fd == self.err_fd))
        return b""

    def take(self, data: bytes, which: int) -> bytes:
        """Keeps output; of a command that streams, the first `limit` bytes go ahead at once."""
        sink = self.err if which else self.out
        raw = bool(self.header.get("raw")) and not which
        if not raw:
            sink.feed(data)
        if not self.stream:
            return b""
        ahead = data[: self.header["limit"] - self.sent[which]]
        self.sent[which] += len(ahead)
        if raw and len(ahead) < len(data):
            sink.dropped += len(data) - len(ahead)
            self.stop()
        return ahead

    def collect(self) -> None:
        """Reads what the ended command still has in its extra stream, which nobody else is waited for."""
        while self.extra_fd >= 0:
            try:
                self.drain(self.extra_fd)
            except BlockingIOError:
                return

    def shut(self, *names: str) -> None:
        """Closes descriptors."""
        for name in names:
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)

    def result(self, now: float) -> tuple[list[bytes | bytearray], Header]:
        """Returns the outputs, one after the other in parts, and what is to be said of the command."""
        out, err, state = self.out.parts(), self.err.parts(), self.extra.parts()
        return [*out, *err, *([] if self.extra.dropped else state)], {
            "exit_code": self.status,
            "signal": self.signal,
            "stdout_bytes": sum(map(len, out)),
            "stderr_bytes": sum(map(len, err)),
            "truncated": bool(self.out.dropped or self.err.dropped),
            "timed_out": self.timed_out,
            "cancelled": self.cancelled,
            "dirty": self.dirty,
            "disk_full": self.status != 0 and (self.disk_full or disk_full()),
            "duration_s": now - self.started,
        }


def read_some(fd: int) -> bytes:
    """Reads what is there; a terminal whose other side is closed is at its end."""
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        raise
    except OSError:
        return b""


def disk_full() -> bool:
    """Whether a scratch folder has no room for another block or file."""
    for folder in SCRATCH:
        try:
            info = os.statvfs(folder)
        except OSError:
            continue
        # A file system that keeps some room to itself says that it is full before the last block.
        kept = info.f_bavail < info.f_bfree and info.f_bavail * info.f_frsize < 1 << 20
        if info.f_blocks and (not info.f_bavail or kept or (info.f_files and not info.f_favail)):
            return True
    return False
