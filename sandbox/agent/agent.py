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

import errno
import gc
import select
import struct
import sys
import time
from _socket import (
    AF_UNIX,
    MSG_DONTWAIT,
    MSG_PEEK,
    SHUT_WR,
    SOCK_SEQPACKET,
    SOCK_STREAM,
    socket,
    socketpair,
)

from . import libc, small_json
from .command import Command, Launched
from .confine import confine, forbid_cores
from .frames import DIRECT, FOLDERS, FORK, FREE, STATUS, Outgoing, send, spawns
from .process import FOREVER, Poll, Process, resize, terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from typing import Any

    from .frames import Header
else:
    import _signal as signal  # without enumerations, which cost more than all else here
    import posix as os  # and without what `os` adds to it

HEADER = struct.Struct("!II")
MAX_HEADER, MAX_BODY = 1 << 18, 64 << 20
RETRY_S, SLOTS, KEEPERS, HURRIED = 5.0, 256, 2, 2
FULL, READ, IDLE_S = 1 << 20, 1 << 16, 5.0


class Agent:
    """The event loop: requests in, commands run, replies out."""

    def __init__(
        self, channel_in: int, channel_out: int, zygote: socket, uid: int | None, fresh: bool, spawns: bool
    ):
        self.uid, self.fresh = uid, fresh
        self.channel_in, self.channel_out, self.zygote = channel_in, channel_out, zygote
        self.received, self.outgoing = bytearray(), Outgoing(channel_out)
        self.commands: dict[int, Command] = {}
        self.background: dict[int, socket] = {}
        self.deferred: list[Command] = []
        self.spares: dict[bool, list[Launched]] = {False: [], True: []}
        self.hurried: set[bool] = set()
        self.keepers: list[socket] = []
        self.leaving: dict[int, int] = {}
        self.held_at, self.used = 0.0, 0.0
        self.slots = set(range(1, SLOTS))
        self.sequence, self.open, self.spawns = 0, True, spawns
        os.set_blocking(channel_in, False)
        os.set_blocking(channel_out, False)

    def run(self) -> None:
        """Serves until the channel closes; the keepers then end everything that still runs."""
        while self.open:
            self.wait()
            now = time.monotonic()
            if self.deferred and not self.background and not self.leavers():
                self.resume()
            for command in list(self.commands.values()):
                if isinstance(command, Process):
                    for poll, data, fields in command.ready(now):
                        self.reply(poll.id, data, **fields)
                    if now >= command.deadline and not command.ended_at and not self.held_at:
                        command.deadline = FOREVER
                        command.stop()
                elif command.finished(now):
                    self.report(command, now)
                elif now >= command.deadline and not command.ended_at and not self.held_at:
                    command.timed_out = True
                    command.deadline = now + 3600
                    command.stop()

    def wait(self) -> None:
        """Waits for the next event and moves bytes."""
        poller = select.poll()
        poller.register(self.channel_in, select.POLLIN)
        poller.register(self.zygote.fileno(), select.POLLIN)
        if self.outgoing.parts:
            poller.register(self.channel_out, select.POLLOUT)
        for fd in self.background:
            poller.register(fd, select.POLLIN)
        for spare in self.waiting():
            poller.register(spare.keeper.fileno(), select.POLLIN)
        owners: dict[int, Command] = {}
        now = time.monotonic()
        if now - self.used > IDLE_S and not self.commands and not self.held_at:
            self.dismiss()
        wake = now + (0.02 if self.deferred else 60)
        if self.waiting() and not self.commands and not self.held_at:
            wake = min(wake, self.used + IDLE_S + 0.01)
        for command in self.commands.values():
            self.register(poller, command, owners)
            wake = min(wake, command.wake_at())
        timeout_s = max(wake - time.monotonic(), 0)
        for fd, _ in poller.poll(timeout_s * 1000 + (1 if timeout_s else 0)):
            self.serve(fd, owners)

    def register(self, poller: select.poll, command: Command, owners: dict[int, Command]) -> None:
        """Adds the descriptors of a command to what is waited for; a stream waits for a full channel."""
        full = command.stream and self.outgoing.size > FULL
        if isinstance(command, Process):
            full = command.full(time.monotonic())
        fds = [] if command.gone else [command.keeper.fileno()]
        fds += [] if full else command.outputs()
        if command.extra_fd >= 0 and not isinstance(command, Process):
            fds.append(command.extra_fd)
        for fd in fds:
            owners[fd] = command
            poller.register(fd, select.POLLIN)
        if command.stdin_fd >= 0 and command.stdin:
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
            said = self.background[fd].recv(STATUS.size)
            if not said or STATUS.unpack(said)[0] == FREE:
                self.background.pop(fd).close()
                if slot := self.leaving.pop(fd, 0):
                    self.slots.add(slot)
        elif found := [spare for spare in self.waiting() if fd == spare.keeper.fileno()]:
            self.discard(found[0])
        elif fd in owners:
            command = owners[fd]
            if fd == command.stdin_fd:
                command.feed()
            elif fd == command.keeper.fileno():
                command.hear()
            elif ahead := command.drain(fd):
                self.reply(command.id, ahead, event=int(fd == owners[fd].err_fd))

    def receive(self) -> None:
        """Reads requests off the channel and serves them."""
        data = os.read(self.channel_in, READ)
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
            self.handle(small_json.loads(text), text, payload)

    def handle(self, header: Header, text: bytes, payload: bytes) -> None:
        """Serves one request; a command that cannot be started goes back as an error."""
        serve = getattr(self, "do_" + header["op"], None)
        try:
            if serve is not None:
                serve(header, text, payload)
            else:
                self.start(header, text, payload)
        except OSError as error:
            self.reply(header["id"], error=errno.errorcode.get(error.errno or 0, "EIO"))

    def do_ping(self, header: Header, text: bytes, payload: bytes) -> None:
        """Gives a sign of life."""
        self.reply(header["id"])

    def do_hold(self, header: Header, text: bytes, payload: bytes) -> None:
        """The sandbox is about to be paused: no deadline counts until it goes on."""
        self.held_at = self.held_at or time.monotonic()
        self.reply(header["id"])

    def do_go_on(self, header: Header, text: bytes, payload: bytes) -> None:
        """The sandbox goes on: deadlines move by the time it was paused."""
        held_s = time.monotonic() - self.held_at if self.held_at else 0.0
        for command in self.commands.values():
            command.deadline += held_s
        self.used += held_s  # what waited before the pause is still there for the first caller after it
        self.held_at = 0.0
        self.reply(header["id"])

    def do_halt(self, header: Header, text: bytes, payload: bytes) -> None:
        """Ends the trees of all commands; says how many are still there."""
        running = [command for command in self.commands.values() if not command.gone]
        for command in running:
            command.cancelled = True
            command.stop()
        for keeper in self.background.values():
            keeper.shutdown(SHUT_WR)
        self.reply(header["id"], left=len(running) + len(self.background))

    def do_kill(self, header: Header, text: bytes, payload: bytes) -> None:
        """Ends the tree of a command."""
        command = self.commands.get(header["target"])
        if command is not None:
            command.cancelled = True
            command.stop()
        self.reply(header["id"])

    def do_start(self, header: Header, text: bytes, payload: bytes) -> None:
        """Starts a process that goes on after the reply."""
        if sum(isinstance(command, Process) for command in self.commands.values()) >= header["most"]:
            self.forget()
        job = text if self.direct(header, text) else b""
        process = Process(header, text, payload, self.launch(0, header, job))
        self.commands[process.id] = process
        process.feed()
        self.reply(header["id"])

    def do_poll(self, header: Header, text: bytes, payload: bytes) -> None:
        """Answers with output and state, as soon as there is news."""
        self.process(header).ask(Poll(header))

    def do_signal(self, header: Header, text: bytes, payload: bytes) -> None:
        """Sends a signal to a process and its group."""
        self.process(header).send(header["number"])
        self.reply(header["id"])

    def do_input(self, header: Header, text: bytes, payload: bytes) -> None:
        """Writes to the input of a process."""
        if not self.process(header).write(payload, header["eof"]):
            raise OSError(errno.ENOBUFS, "it does not read")
        self.reply(header["id"])

    def do_resize(self, header: Header, text: bytes, payload: bytes) -> None:
        """Changes the size of a terminal."""
        resize(self.process(header).extra_fd, header["rows"], header["columns"])
        self.reply(header["id"])

    def process(self, header: Header) -> Process:
        """Returns the process that a request names."""
        found = self.commands.get(header["process"])
        if not isinstance(found, Process):
            raise OSError(errno.ESRCH, "no such process")
        return found

    def forget(self) -> None:
        """Lets go of the oldest process that has ended."""
        now = time.monotonic()
        for number, process in self.commands.items():
            if isinstance(process, Process) and process.over(now) and not process.polls:
                del self.commands[number]
                if (keeper := process.release()) is not None:
                    self.background[keeper.fileno()] = keeper
                return
        raise OSError(errno.EMFILE, "too many processes run")

    def direct(self, header: Header, text: bytes) -> bool:
        """Whether a command is a program that its keeper can start at once, without a fork of Python.

        What is no text, which JSON can spell, is left to Python.
        """
        if header["op"] not in ("exec", "start") or header.get("pty") or self.fresh or not self.spawns:
            return False
        small = len(text) <= DIRECT and header["env"].get("PATH", "").count(":") < FOLDERS
        return small and b"\\ud" not in text

    def start(self, header: Header, text: bytes, stdin: bytes) -> None:
        """Starts a command; what needs Python, in the fork that waits if that is as it needs."""
        brief = header["op"] == "python" or self.fresh
        if self.direct(header, text):
            launched = self.launch(0, header, text)
        elif self.waits(brief) and not header.get("user") and not header.get("state"):
            launched = self.spares[brief].pop(0)
        else:
            self.hurried.add(brief)  # callers come faster than one fork at a time
            launched = self.launch(self.slots.pop() if brief else 0, header)
        command = Command(header, text, stdin, launched)
        self.commands[command.id] = command
        command.feed()

    def launch(self, slot: int, header: Header, job: bytes = b"") -> Launched:
        """Has a keeper start a job, or the fork that waits for one."""
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = [os.pipe() for _ in range(3)]
        extra, given = -1, [in_r, out_w, err_w]
        if header.get("pty"):
            extra, far = terminal(self.uid, *header["pty"])
            given.append(far)
        elif header.get("state"):
            extra, far = os.pipe()
            given.append(far)
        keeper = self.kept(FORK.pack(slot, header.get("user") or 0) + job, given, bool(slot))
        for fd in given:
            os.close(fd)
        for fd in (in_w, out_r, err_r, *([extra] if extra >= 0 else [])):
            os.set_blocking(fd, False)
        return Launched((in_w, out_r, err_r), keeper, slot, extra, bool(job))

    def kept(self, work: bytes, given: list[int], brief: bool) -> socket:
        """Hands the descriptors of a command to a keeper: one that is free, or a new one of the zygote."""
        while self.keepers and not brief:
            keeper = self.keepers.pop()
            try:
                send(keeper, work, given)
            except OSError:  # it was killed
                keeper.close()
            else:
                return keeper
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        send(self.zygote, work, [*given, theirs.fileno()])
        theirs.close()
        return ours

    def waiting(self) -> list[Launched]:
        """Returns the commands that wait for their job."""
        return self.spares[False] + self.spares[True]

    def waits(self, brief: bool) -> bool:
        """Whether a command of a kind waits; those that were killed meanwhile are let go of."""
        while self.spares[brief]:
            try:
                self.spares[brief][0].keeper.recv(1, MSG_PEEK | MSG_DONTWAIT)
            except BlockingIOError:
                return True
            self.discard(self.spares[brief][0])
        return False

    def refill(self, brief: bool) -> None:
        """Keeps commands of a kind waiting: their forks are then not what the next caller waits for."""
        # Without users of their own commands could stop one that waits: none does while another runs.
        wanted = HURRIED if brief in self.hurried and self.uid is not None else 1
        while len(self.spares[brief]) < wanted:
            try:
                self.spares[brief].append(self.launch(self.slots.pop() if brief else 0, {}))
            except OSError:
                return

    def dismiss(self) -> None:
        """Lets those go that wait, as nobody has come: an idle sandbox is to be small."""
        for spare in self.waiting():
            spare.keeper.shutdown(SHUT_WR)
            self.background[spare.keeper.fileno()] = spare.keeper
            self.leaving[spare.keeper.fileno()] = spare.slot
            for fd in spare.fds:
                os.close(fd)
        self.spares = {False: [], True: []}
        self.hurried.clear()
        for keeper in self.keepers:
            keeper.close()
        self.keepers.clear()
        libc.call("malloc_trim", 0)

    def discard(self, spare: Launched) -> None:
        """Lets go of a command that waited; it has ended."""
        self.spares[bool(spare.slot)].remove(spare)
        if spare.slot:
            self.slots.add(spare.slot)
        spare.keeper.close()
        for fd in spare.fds:
            os.close(fd)

    def report(self, command: Command, now: float) -> None:
        """Replies with what a command did and lets go of it."""
        self.used = now
        del self.commands[command.id]
        command.collect()
        command.shut("stdin_fd", "out_fd", "err_fd", "extra_fd")
        if command.slot:
            self.slots.add(command.slot)
        # One that was asked to stop its command may read that only with the next.
        if command.free and not command.stopping and len(self.keepers) < KEEPERS:
            self.keepers.append(command.keeper)
        elif command.gone:
            command.keeper.close()
        else:
            self.background[command.keeper.fileno()] = command.keeper
        if command.status is None and not command.stopping:
            self.fail(command)
            return
        output, fields = command.result(now)
        self.reply(command.id, *output, **fields)
        if not command.direct:
            self.refill(bool(command.slot))

    def fail(self, command: Command) -> None:
        """Answers for a command that did not start; for want of room, others are ended first.

        That is what commands left in the background, or else what was started last: no process that goes on
        by itself takes the sandbox from its caller.
        """
        give_up = command.header.setdefault("give_up", time.monotonic() + RETRY_S)
        if command.failure == errno.EAGAIN and time.monotonic() < give_up:
            self.dismiss()
            for keeper in self.background.values():
                keeper.shutdown(SHUT_WR)
            started = [one for one in self.commands.values() if isinstance(one, Process) and not one.gone]
            if started and not self.background and not self.leavers():
                started[-1].cancelled = True
                started[-1].stop()
            self.deferred.append(command)
        else:
            self.reply(command.id, error=errno.errorcode.get(command.failure, "EIO"))

    def leavers(self) -> list[Command]:
        """Returns the processes that are being ended."""
        return [
            one
            for one in self.commands.values()
            if isinstance(one, Process) and one.stopping and not one.gone
        ]

    def resume(self) -> None:
        """Starts what waited for the end of what ran in the background."""
        commands, self.deferred = self.deferred, []
        for command in commands:
            self.start(command.header, command.text, command.input)

    def reply(self, request_id: int, *body: bytes | bytearray, **fields: Any) -> None:
        """Queues a reply, whose body may come in parts, and sends what the channel takes."""
        self.sequence += 1
        text = small_json.dumps({"id": request_id, "seq": self.sequence, **fields}).encode()
        self.outgoing.add(HEADER.pack(len(text), sum(map(len, body))) + text, *body)
        self.flush()

    def flush(self) -> None:
        """Writes queued replies."""
        self.open = self.outgoing.flush() and self.open


def opened(path: str) -> tuple[int, int]:
    """Opens the channel at a path, on whose other side the host waits for one caller."""
    channel = socket(AF_UNIX, SOCK_STREAM)
    channel.connect(path)
    return os.dup(channel.fileno()), channel.detach()


def main() -> None:
    """Takes the channel off stdin and stdout, so that no command can inherit it, or opens it, and serves."""
    config: Header = small_json.loads(sys.argv[1])
    config["uid"] = config["uid"] if os.geteuid() == 0 else None
    forbid_cores()
    config.setdefault("fresh", "")
    confine(config)
    if config.get("door"):
        from .network import hand_over

        hand_over(config["door"])
    channel_in, channel_out = opened(config["channel"]) if config.get("channel") else (os.dup(0), os.dup(1))
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if os.getpid() == 1:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans come here and are nobody's to wait for
    gc.collect()
    gc.freeze()
    libc.call("malloc_trim", 0)  # what the imports needed is not needed any more
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.close(channel_in)
        os.close(channel_out)
        from .keeper import serve_forks  # only here: what it needs is imported while the agent answers

        serve_forks(theirs, config)
    theirs.close()
    Agent(channel_in, channel_out, ours, config["uid"], bool(config["fresh"]), spawns()).run()


if __name__ == "__main__":
    main()
