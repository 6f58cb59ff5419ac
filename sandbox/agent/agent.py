"""The resident agent: the one process that answers for a sandbox, on a framed channel over its pipes.

Pure standard library, started before any untrusted code. The host treats it as hostile ground all the same:
it holds no secret and keeps no log. A frame is `!II` (length of the JSON header, length of the body), the
header, the body; replies repeat the request's `id` and count up in `seq`.

    agent -> zygote -> keeper -> command      (agent, zygote and keeper stay root where the agent is root)

The zygote is forked before the first request, so that a Python command, which is a fork of it, finds
nothing of other commands in its memory. `keeper.py` says how a command ends with its whole tree. What
`exec` leaves running in the background stays; a Python command leaves no process and no file behind.
"""

from __future__ import annotations

import array
import base64
import ctypes
import errno
import json
import os
import select
import signal
import struct
import sys
import time
from _socket import AF_UNIX, SCM_RIGHTS, SHUT_WR, SOCK_SEQPACKET, SOL_SOCKET, socket, socketpair

from .keeper import DIRTY, DONE, EXITED, FAILED, STATUS, serve_forks
from .program import CHUNK, JOB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .program import Header

HEADER = struct.Struct("!II")
MAX_HEADER, MAX_BODY = 1 << 16, 64 << 20
GRACE_S, RETRY_S, SLOTS = 0.2, 5.0, 256
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
_libc = ctypes.CDLL(None, use_errno=True)


class Capped:
    """Keeps the head and the tail of a stream, at most `limit` bytes, and counts what it dropped."""

    def __init__(self, limit: int):
        self.head, self.tail = bytearray(), bytearray()
        self.half, self.dropped = max(limit // 2, 1), 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes; the tail is cut only when it has doubled, so that bytes are moved once."""
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.half:
            self.cut()

    def cut(self) -> None:
        """Drops what is over the limit."""
        over = len(self.tail) - self.half
        if over > 0:
            del self.tail[:over]
            self.dropped += over

    def value(self) -> bytes:
        """Returns what was kept, with a note in place of what was dropped."""
        self.cut()
        note = b"\n[... %d bytes dropped ...]\n" % self.dropped if self.dropped else b""
        return bytes(self.head) + note + bytes(self.tail)


class Command:
    """A running command: its streams, the socket of its keeper, and its deadline."""

    def __init__(self, header: Header, stdin: bytes, fds: tuple[int, int, int], keeper: socket, slot: int):
        self.header, self.request = header, stdin
        self.id, self.keeper, self.slot = int(header["id"]), keeper, slot
        self.stdin_fd, self.out_fd, self.err_fd = fds
        self.stdin = memoryview(stdin)
        self.out, self.err = Capped(header["limit"]), Capped(header["limit"])
        self.started = time.monotonic()
        self.deadline = self.started + header["timeout_s"]
        self.status: int | None = None
        self.failure = 0
        self.ended_at = 0.0
        self.timed_out = self.cancelled = self.stopping = self.gone = self.dirty = False

    def streams(self) -> dict[int, Capped]:
        """Returns the open output descriptors, with what each feeds."""
        return {fd: sink for fd, sink in ((self.out_fd, self.out), (self.err_fd, self.err)) if fd >= 0}

    def wake_at(self) -> float:
        """Returns when something is to be done although nothing was heard."""
        return self.ended_at + GRACE_S if self.ended_at else self.deadline

    def finished(self, now: float) -> bool:
        """Whether to report: the tree is gone, or the main process is and a child only holds its streams."""
        if not self.gone and (self.status is None or self.stopping or self.slot):
            return False
        return not self.streams() or now >= self.ended_at + GRACE_S

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
            self.status = value if kind == EXITED else self.status
            self.failure = value if kind == FAILED else self.failure
            self.dirty = self.dirty or kind == DIRTY
            self.gone = kind in (DONE, DIRTY)
        self.ended_at = self.ended_at or time.monotonic()

    def feed(self) -> None:
        """Writes standard input; a command that does not read it loses it."""
        try:
            self.stdin = self.stdin[os.write(self.stdin_fd, self.stdin[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.stdin = self.stdin[:0]
        if not self.stdin:
            self.shut("stdin_fd")

    def drain(self, fd: int) -> None:
        """Reads one output stream."""
        data = os.read(fd, CHUNK)
        if data:
            self.streams()[fd].feed(data)
        else:
            self.shut("out_fd" if fd == self.out_fd else "err_fd")

    def shut(self, *names: str) -> None:
        """Closes descriptors."""
        for name in names:
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)


class Agent:
    """The event loop: requests in, commands run, replies out."""

    def __init__(self, channel_in: int, channel_out: int, zygote: socket):
        self.channel_in, self.channel_out, self.zygote = channel_in, channel_out, zygote
        self.received, self.outgoing = bytearray(), bytearray()
        self.commands: dict[int, Command] = {}
        self.background: dict[int, socket] = {}
        self.deferred: list[Command] = []
        self.spare: tuple[tuple[int, int, int], socket, int] | None = None
        self.slots = set(range(1, SLOTS))
        self.sequence = 0
        self.open = True
        os.set_blocking(channel_in, False)
        os.set_blocking(channel_out, False)

    def run(self) -> None:
        """Serves until the channel closes; the keepers then end everything that still runs."""
        while self.open:
            self.wait()
            now = time.monotonic()
            if self.deferred and not self.background:
                self.resume()
            for command in list(self.commands.values()):
                if command.finished(now):
                    self.report(command, now)
                elif now >= command.deadline and not command.ended_at and not command.timed_out:
                    command.timed_out = True
                    command.deadline = now + 3600
                    command.stop()

    def wait(self) -> None:
        """Waits for the next event and moves bytes."""
        poller = select.poll()
        poller.register(self.channel_in, select.POLLIN)
        poller.register(self.zygote.fileno(), select.POLLIN)
        if self.outgoing:
            poller.register(self.channel_out, select.POLLOUT)
        for fd in self.background:
            poller.register(fd, select.POLLIN)
        if self.spare is not None:
            poller.register(self.spare[1].fileno(), select.POLLIN)
        owners: dict[int, Command] = {}
        wake = time.monotonic() + (0.02 if self.deferred else 60)
        for command in self.commands.values():
            self.register(poller, command, owners)
            wake = min(wake, command.wake_at())
        timeout_s = max(wake - time.monotonic(), 0)
        for fd, _ in poller.poll(timeout_s * 1000 + (1 if timeout_s else 0)):
            self.serve(fd, owners)

    def register(self, poller: select.poll, command: Command, owners: dict[int, Command]) -> None:
        """Adds the descriptors of a command to what is waited for."""
        fds = [*command.streams()] + ([] if command.gone else [command.keeper.fileno()])
        for fd in fds:
            owners[fd] = command
            poller.register(fd, select.POLLIN)
        if command.stdin_fd >= 0:
            owners[command.stdin_fd] = command
            poller.register(command.stdin_fd, select.POLLOUT)

    def serve(self, fd: int, owners: dict[int, Command]) -> None:
        """Serves one descriptor that is ready."""
        if fd == self.channel_in:
            self.receive()
        elif fd == self.channel_out:
            self.flush()
        elif fd == self.zygote.fileno():
            self.open = False
        elif fd in self.background:
            if not self.background[fd].recv(STATUS.size):
                self.background.pop(fd).close()
        elif self.spare is not None and fd == self.spare[1].fileno():
            self.discard()
        elif fd in owners:
            command = owners[fd]
            if fd == command.stdin_fd:
                command.feed()
            elif fd in command.streams():
                command.drain(fd)
            else:
                command.hear()

    def receive(self) -> None:
        """Reads requests off the channel and serves them."""
        data = os.read(self.channel_in, 1 << 20)
        self.open = bool(data)
        self.received += data
        while self.open and len(self.received) >= HEADER.size:
            head, body = HEADER.unpack_from(self.received)
            if head > MAX_HEADER or body > MAX_BODY:
                self.open = False
                return
            end = HEADER.size + head + body
            if len(self.received) < end:
                return
            text = bytes(self.received[HEADER.size : HEADER.size + head])
            payload = bytes(self.received[HEADER.size + head : end])
            del self.received[:end]
            self.handle(json.loads(text), text, payload)

    def handle(self, header: Header, text: bytes, payload: bytes) -> None:
        """Serves one request; a command that cannot be started goes back as an error."""
        if header["op"] == "ping":
            self.reply(header["id"])
        elif header["op"] == "kill":
            command = self.commands.get(header["target"])
            if command is not None:
                command.cancelled = True
                command.stop()
            self.reply(header["id"])
        else:
            try:
                self.start(header, JOB.pack(len(text)) + text + payload)
            except OSError as error:
                self.reply(header["id"], error=errno.errorcode.get(error.errno or 0, "EIO"))

    def start(self, header: Header, stdin: bytes) -> None:
        """Starts a command, the job ahead of its input; Python takes what waits, if any."""
        if header["op"] != "python":
            process = self.launch(0)
        elif self.spare is not None:
            process, self.spare = self.spare, None
        else:
            process = self.launch(self.slots.pop())
        command = Command(header, stdin, *process)
        self.commands[command.id] = command
        command.feed()

    def launch(self, slot: int) -> tuple[tuple[int, int, int], socket, int]:
        """Has the zygote fork a keeper, which forks a command that waits for its job."""
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        pipes = [os.pipe() for _ in range(3)]
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = pipes
        given = array.array("i", [in_r, out_w, err_w, theirs.fileno()])
        self.zygote.sendmsg([JOB.pack(slot)], [(SOL_SOCKET, SCM_RIGHTS, given)])
        theirs.close()
        for fd in (in_r, out_w, err_w):
            os.close(fd)
        for fd in (in_w, out_r, err_r):
            os.set_blocking(fd, False)
        return (in_w, out_r, err_r), ours, slot

    def refill(self) -> None:
        """Keeps one Python command waiting: its forks are then not what the next caller waits for."""
        if self.spare is None:
            try:
                self.spare = self.launch(self.slots.pop())
            except OSError:
                return

    def discard(self) -> None:
        """Lets go of the command that waited; it has ended."""
        assert self.spare is not None
        fds, keeper, slot = self.spare
        self.spare = None
        self.slots.add(slot)
        keeper.close()
        for fd in fds:
            os.close(fd)

    def report(self, command: Command, now: float) -> None:
        """Replies with what a command did and lets go of it."""
        del self.commands[command.id]
        command.shut("stdin_fd", "out_fd", "err_fd")
        if command.slot:
            self.slots.add(command.slot)
        if command.gone:
            command.keeper.close()
        else:
            self.background[command.keeper.fileno()] = command.keeper
        if command.status is None and not command.stopping:
            self.fail(command)
            return
        out, err = command.out.value(), command.err.value()
        self.reply(
            command.id,
            out + err,
            exit_code=command.status,
            stdout_bytes=len(out),
            truncated=bool(command.out.dropped or command.err.dropped),
            timed_out=command.timed_out,
            cancelled=command.cancelled,
            dirty=command.dirty,
            duration_s=now - command.started,
        )
        if command.slot:
            self.refill()

    def fail(self, command: Command) -> None:
        """Answers for a command that did not start; for want of room, the background is ended first."""
        give_up = command.header.setdefault("give_up", time.monotonic() + RETRY_S)
        if command.failure == errno.EAGAIN and time.monotonic() < give_up:
            for keeper in self.background.values():
                keeper.shutdown(SHUT_WR)
            self.deferred.append(command)
        else:
            self.reply(command.id, error=errno.errorcode.get(command.failure, "EIO"))

    def resume(self) -> None:
        """Starts what waited for the end of what ran in the background."""
        commands, self.deferred = self.deferred, []
        for command in commands:
            self.start(command.header, command.request)

    def reply(self, request_id: int, body: bytes = b"", **fields: Any) -> None:
        """Queues a reply and sends what the channel takes."""
        self.sequence += 1
        text = json.dumps({"id": request_id, "seq": self.sequence, **fields}).encode()
        self.outgoing += HEADER.pack(len(text), len(body)) + text + body
        self.flush()

    def flush(self) -> None:
        """Writes queued replies."""
        try:
            while self.outgoing:
                done = os.write(self.channel_out, self.outgoing[: 1 << 20])
                del self.outgoing[:done]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.open = False


def confine(config: Header) -> None:
    """Gives up, for good and for all children, new privileges and the system calls of the filter."""
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if config["uid"] is None:
        _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # commands share the agent's user: no ptrace of it
    if config["seccomp"]:
        program = base64.b64decode(config["seccomp"])
        code = ctypes.create_string_buffer(program)
        head = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
        if _libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(head), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the system call filter was refused")


def main() -> None:
    """Takes the channel off stdin and stdout, so that no command can inherit it, and serves."""
    config: Header = json.loads(sys.argv[1])
    config["uid"] = config["uid"] if os.geteuid() == 0 else None
    confine(config)
    channel_in, channel_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.close(channel_in)
        os.close(channel_out)
        serve_forks(theirs, config)
    theirs.close()
    Agent(channel_in, channel_out, ours).run()


if __name__ == "__main__":
    main()
