"""The resident agent: the one process that answers for a sandbox, over one framed channel on stdin and stdout.

It is a single file of the standard library and is started before any untrusted code. The host treats it as
hostile ground all the same: it holds no secret and keeps no log. A frame is `!II` (length of the JSON header,
length of the body), the header, the body. Every request has an `id`; its reply carries the same.

Each command runs below a keeper of its own: a child subreaper to which orphans of the command return, so that
ending a command ends its whole tree, double-forked daemons included. Where the agent is root in the sandbox,
commands run as another user and can reach neither keeper nor agent.
"""

import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
import time

HEADER = struct.Struct("!II")
MAX_HEADER, MAX_BODY = 1 << 16, 64 << 20
CHUNK = 1 << 16
GRACE_S = 0.2
SAFE_PATH = "/usr/local/bin:/usr/bin:/bin"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


class Capped:
    """Keeps the head and the tail of a stream, at most `limit` bytes, and counts what it dropped."""

    def __init__(self, limit):
        self.head, self.tail = bytearray(), bytearray()
        self.half, self.dropped = max(limit // 2, 1), 0

    def feed(self, data):
        """Takes the next bytes."""
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if (over := len(self.tail) - self.half) > 0:
            del self.tail[:over]
            self.dropped += over

    def value(self):
        """Returns what was kept, with a note in place of what was dropped."""
        if not self.dropped:
            return bytes(self.head + self.tail)
        return bytes(self.head) + b"\n[... %d bytes dropped ...]\n" % self.dropped + bytes(self.tail)


class Command:
    """A running command: its keeper, its streams and its deadline."""

    def __init__(self, request_id, keeper, pipes, stdin, header):
        self.id, self.keeper = request_id, keeper
        self.stdin_fd, self.out_fd, self.err_fd, self.exit_fd = pipes
        self.stdin = memoryview(stdin)
        self.out, self.err = Capped(header["limit"]), Capped(header["limit"])
        self.started = time.monotonic()
        self.deadline = self.started + header["timeout_s"]
        self.status, self.exit_data = None, b""
        self.timed_out = self.cancelled = False
        self.ended_at = None

    def fds(self):
        """Returns the open descriptors that are read, with what each feeds."""
        return {fd: sink for fd, sink in ((self.out_fd, self.out), (self.err_fd, self.err)) if fd >= 0}


class Agent:
    """The event loop: requests in, commands run, replies out."""

    def __init__(self, channel_in, channel_out, uid):
        self.channel_in, self.channel_out, self.uid = channel_in, channel_out, uid
        self.received, self.outgoing = bytearray(), bytearray()
        self.commands = {}
        self.open = True
        os.set_blocking(channel_in, False)
        os.set_blocking(channel_out, False)

    def run(self):
        """Serves until the channel closes, then ends everything that still runs."""
        while self.open:
            self.wait()
            for command in list(self.commands.values()):
                self.advance(command)
        for command in self.commands.values():
            os.kill(command.keeper, signal.SIGTERM)

    def wait(self):
        """Waits for the next event and moves bytes."""
        poller = select.poll()
        poller.register(self.channel_in, select.POLLIN)
        if self.outgoing:
            poller.register(self.channel_out, select.POLLOUT)
        owners = {}
        now, timeout = time.monotonic(), 60.0
        for command in self.commands.values():
            for fd in (*command.fds(), *((command.exit_fd,) if command.exit_fd >= 0 else ())):
                owners[fd] = command
                poller.register(fd, select.POLLIN)
            if command.stdin_fd >= 0:
                owners[command.stdin_fd] = command
                poller.register(command.stdin_fd, select.POLLOUT)
            wake = command.deadline if command.ended_at is None else command.ended_at + GRACE_S
            timeout = min(timeout, wake - now)
        for fd, _ in poller.poll(max(timeout, 0) * 1000):
            if fd == self.channel_in:
                self.receive()
            elif fd == self.channel_out:
                self.flush()
            elif fd in owners:
                self.move(owners[fd], fd)

    def receive(self):
        """Reads requests off the channel and starts them."""
        try:
            data = os.read(self.channel_in, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self.open = False
            return
        self.received += data
        while len(self.received) >= HEADER.size:
            head, body = HEADER.unpack_from(self.received)
            if head > MAX_HEADER or body > MAX_BODY:
                self.open = False
                return
            end = HEADER.size + head + body
            if len(self.received) < end:
                return
            header = json.loads(bytes(self.received[HEADER.size : HEADER.size + head]))
            payload = bytes(self.received[HEADER.size + head : end])
            del self.received[:end]
            self.handle(header, payload)

    def handle(self, header, payload):
        """Serves one request; what is wrong with it goes back as an error."""
        try:
            getattr(self, "on_" + header["op"])(header, payload)
        except OSError as error:
            self.reply(header, error=errno.errorcode.get(error.errno, "EIO"), message=str(error))

    def on_ping(self, header, payload):
        """Answers at once."""
        self.reply(header)

    def on_exec(self, header, payload):
        """Starts an argv with `payload` as its standard input."""
        self.start(header, payload, lambda: exec_argv(header["argv"], header["env"]))

    def on_python(self, header, payload):
        """Starts Python source in a fresh fork of this interpreter."""
        size = header["source_bytes"]
        source = payload[:size]
        self.start(header, payload[size:], lambda: run_source(source))

    def on_kill(self, header, payload):
        """Ends a running command with everything below it."""
        command = self.commands.get(header["target"])
        if command is not None:
            command.cancelled = True
            stop(command)
        self.reply(header)

    def on_read(self, header, payload):
        """Returns a regular file of at most `limit` bytes, read with the rights of a command."""
        self.start(header, b"", lambda: copy_out(header["path"], header["limit"]))

    def on_write(self, header, payload):
        """Writes a file with the rights of a command, making its folders."""
        self.start(header, payload, lambda: copy_in(header["path"], header["mode"]))

    def start(self, header, stdin, body):
        """Forks the keeper, which forks the command."""
        pairs = [os.pipe() for _ in range(4)]
        (in_r, in_w), (out_r, out_w), (err_r, err_w), (exit_r, exit_w) = pairs
        keeper = os.fork()
        if keeper == 0:
            keep(body, (in_r, out_w, err_w), exit_w, self.uid, header.get("cwd", "/work"))
        for fd in (in_r, out_w, err_w, exit_w):
            os.close(fd)
        for fd in (in_w, out_r, err_r, exit_r):
            os.set_blocking(fd, False)
        command = Command(header["id"], keeper, (in_w, out_r, err_r, exit_r), stdin, header)
        self.commands[header["id"]] = command
        if not stdin:
            self.shut(command, "stdin_fd")

    def move(self, command, fd):
        """Moves the bytes of one descriptor of a command."""
        if fd == command.stdin_fd:
            self.feed(command)
            return
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if fd == command.exit_fd:
            command.exit_data += data
            if len(command.exit_data) >= 4 or not data:
                self.shut(command, "exit_fd")
                command.ended_at = time.monotonic()
                if len(command.exit_data) >= 4:
                    command.status = struct.unpack("!i", command.exit_data[:4])[0]
        elif data:
            command.fds()[fd].feed(data)
        else:
            self.shut(command, "out_fd" if fd == command.out_fd else "err_fd")

    def feed(self, command):
        """Writes standard input; a command that does not read it loses it."""
        try:
            done = os.write(command.stdin_fd, command.stdin[:CHUNK])
            command.stdin = command.stdin[done:]
        except BlockingIOError:
            return
        except BrokenPipeError:
            command.stdin = command.stdin[:0]
        if not command.stdin:
            self.shut(command, "stdin_fd")

    def shut(self, command, name):
        """Closes one descriptor of a command."""
        if (fd := getattr(command, name)) >= 0:
            os.close(fd)
            setattr(command, name, -1)

    def advance(self, command):
        """Ends a command whose time is up, and reports one that ended (a child may still hold its streams)."""
        now = time.monotonic()
        if command.ended_at is None:
            if now >= command.deadline and not command.timed_out:
                command.timed_out = True
                stop(command)
                command.deadline = now + 3600
            return
        if command.fds() and now < command.ended_at + GRACE_S:
            return
        stop(command)
        for name in ("stdin_fd", "out_fd", "err_fd"):
            self.shut(command, name)
        os.waitpid(command.keeper, 0)
        del self.commands[command.id]
        out, err = command.out.value(), command.err.value()
        self.reply(
            {"id": command.id},
            out + err,
            exit_code=command.status,
            stdout_bytes=len(out),
            truncated=bool(command.out.dropped or command.err.dropped),
            timed_out=command.timed_out,
            cancelled=command.cancelled,
            duration_s=now - command.started,
        )

    def reply(self, header, body=b"", **fields):
        """Queues a reply and sends what the channel takes."""
        text = json.dumps({"id": header["id"], **fields}).encode()
        self.outgoing += HEADER.pack(len(text), len(body)) + text + body
        self.flush()

    def flush(self):
        """Writes queued replies."""
        try:
            while self.outgoing:
                done = os.write(self.channel_out, self.outgoing[: 1 << 20])
                del self.outgoing[:done]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.open = False


def stop(command):
    """Asks a command's keeper to end its tree."""
    try:
        os.kill(command.keeper, signal.SIGTERM)
    except ProcessLookupError:
        pass


def keep(body, streams, exit_fd, uid, cwd):
    """Runs a command and ends with its whole tree gone. Never returns."""
    try:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
        child = os.fork()
        if child == 0:
            become_command(body, streams, uid, cwd)
        close_all_but({exit_fd})
        status = None
        while True:
            if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
                break
            if (ended := reap(child)) is not None:
                status = ended
                os.write(exit_fd, struct.pack("!i", status))
        end_tree()
        if status is None:
            os.write(exit_fd, struct.pack("!i", -signal.SIGKILL))
    finally:
        os._exit(0)


def reap(child):
    """Reaps what ended and returns the status of `child` when it is among it: exit code, or minus signal."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = os.waitstatus_to_exitcode(status)


def end_tree():
    """Kills every descendant of this process until none is left; orphans among them have become children."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.001)


def descendants(root):
    """Returns all processes below `root`, from /proc."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found, grown = {root}, True
    while grown:
        new = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        found |= new
        grown = bool(new)
    return found - {root}


def become_command(body, streams, uid, cwd):
    """Turns a fresh fork into the command: its streams, its user, nothing else of the agent. Never returns."""
    code = 127
    try:
        os.setsid()
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        close_all_but({0, 1, 2})
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.chdir(cwd)
        code = body()
    except BaseException as error:
        os.write(2, ("%s: %s\n" % (type(error).__name__, error)).encode())
    finally:
        os._exit(code)


def close_all_but(keep_open):
    """Closes every descriptor but those named."""
    low = 0
    for fd in [*sorted(keep_open), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]:
        if low < fd:  # an empty range would close everything
            os.closerange(low, fd)
        low = fd + 1


def exec_argv(argv, env):
    """Replaces the process by a program; its name is looked up in the command's own PATH."""
    os.execvpe(argv[0], argv, {"PATH": SAFE_PATH, "HOME": "/work", "LANG": "C.UTF-8", **env})


def run_source(source):
    """Runs Python source as a main program and returns its exit code."""
    os.environ.clear()
    os.environ.update(PATH=SAFE_PATH, HOME="/work", LANG="C.UTF-8")
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)
    code = 0
    try:
        exec(compile(source, "<source>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException as error:
        print(type(error).__name__ + ": " + str(error), file=sys.stderr)
        code = 1
    sys.stdout.flush()
    return code & 255


def copy_out(path, limit):
    """Writes a regular file to standard output; one that is larger than `limit` is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(fd)
    if info.st_mode & 0o170000 != 0o100000:
        raise OSError(errno.EINVAL, "not a regular file")
    if info.st_size > limit:
        raise OSError(errno.EFBIG, "%d bytes are more than the limit of %d" % (info.st_size, limit))
    while data := os.read(fd, CHUNK):
        os.write(1, data)
    return 0


def copy_in(path, mode):
    """Writes standard input to a file."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    while data := os.read(0, CHUNK):
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    os.fchmod(fd, mode)
    return 0


def main():
    """Takes the channel off stdin and stdout, so that no command can inherit it, and serves."""
    uid = int(sys.argv[1]) if len(sys.argv) > 1 and os.geteuid() == 0 else None
    channel_in, channel_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Agent(channel_in, channel_out, uid).run()


if __name__ == "__main__":
    main()
