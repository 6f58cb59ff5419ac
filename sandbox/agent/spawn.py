"""How a program is started without a fork of the interpreter, which would take longer than the program.

A fork copies the interpreter's page tables, and both sides then copy the pages that they touch. Here the
child shares the keeper's memory until the program is there, on a stack of its own, and runs not one line of
Python but `RUNNER`, machine code that makes the system calls of a list: what the child does is laid out
beforehand, and its results stand in the same list. Whoever starts such a child stands still until the program
is there (`clone` with CLONE_VFORK, without which the child would share the keeper's place in the order in
which processes are ended for want of memory). That is a thread: other commands can stop the child.

Only where that code is known: elsewhere, and for what needs Python in the child, `program.py` has the fork.
"""

from __future__ import annotations

import _thread
import mmap
import os
import resource
import struct

from . import libc
from .program import ENVIRONMENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal

    from .frames import Header
else:
    import _signal as signal  # without enumerations, which cost more than all else here

RUNNER = bytes.fromhex(
    "4889fb"  #         mov  rbx, rdi         the first call of the list
    "488b03"  #   next: mov  rax, [rbx]       its number
    "488b7b08"  #       mov  rdi, [rbx+8]     and four arguments
    "488b7310"  #       mov  rsi, [rbx+16]
    "488b5318"  #       mov  rdx, [rbx+24]
    "4c8b5320"  #       mov  r10, [rbx+32]
    "0f05"  #           syscall
    "48894328"  #       mov  [rbx+40], rax    what it returned
    "4885c0"  #         test rax, rax
    "7806"  #           js   failed
    "4883c338"  #       add  rbx, 56
    "ebdc"  #           jmp  next
    "48035b30"  # failed: add rbx, [rbx+48]   from here, how far it is to where it goes on then
    "ebd6"  #           jmp  next
)
"""For x86-64."""

CALL = struct.Struct("7q")
DUP2, SIGACTION, SIGPROCMASK, GETPID, EXECVE, FCNTL, CHDIR, UMASK = 33, 13, 14, 39, 59, 72, 80, 95
SETSID, SETGROUPS, SETRESUID, SETRESGID, CAPSET, EXIT_GROUP, PRLIMIT = 112, 116, 117, 119, 126, 231, 302
OPEN, WRITE, CLOSE = 2, 1, 3
SIG_SETMASK, F_SETFD, SIGSET = 2, 2, 8
CLONE = 0x100 | 0x4000 | 0x100000 | 17
"""CLONE_VM, CLONE_VFORK, CLONE_PARENT_SETTID (the kernel writes down who the child is), SIGCHLD."""

M_ARENA_MAX, THREAD = -8, 1 << 17
PLACE, SIZE, STACK, EXECUTABLE = 8, 1 << 20, 1 << 14, mmap.PROT_READ | mmap.PROT_EXEC
FIRST_TO_END = "/proc/self/oom_score_adj"
NOT_THERE = (2, 20)
"""ENOENT and ENOTDIR: the program may still be in another folder."""


class Spawner:
    """Starts the programs of one keeper, one after the other has ended: they have its memory in turn."""

    def __init__(self, config: Header):
        self.config = config
        self.code = libc.Memory(mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.code.write(0, RUNNER)
        self.code.protect(EXECUTABLE)
        self.area = libc.Memory(bytearray(SIZE))
        self.limits = [
            (getattr(resource, "RLIMIT_" + name), struct.pack("2Q", value, value))
            for name, value in config["rlimits"].items()
        ]
        self.end = 0
        self.calls: list[tuple[int, int, int, int, int]] = []
        self.list = self.first = self.argv = 0
        self.refused = False
        _thread.stack_size(THREAD)
        libc.call("mallopt", M_ARENA_MAX, 1)

    def lay_out(self, job: Header, streams: list[int], uid: int | None) -> None:
        """Prepares the start of a program with its streams, as a user.

        Raises:
            OSError: It is too much for the area.
        """
        self.end, self.calls, self.refused = PLACE, [], False
        self.area.write(0, bytes(PLACE))
        env = {**ENVIRONMENT, **job["env"]}
        if uid is not None:  # without root the agent has done so: its own files in /proc are closed to it now
            self.expose()
        self.prepare(streams, job.get("state") or None)
        self.become(uid)
        self.call(CHDIR, self.text(job.get("cwd", "/workspace")))
        self.argv = len(self.calls)
        self.execute(job["argv"], env)
        self.list = self.lay()

    def start(self, streams: list[int]) -> None:
        """Starts it, and closes its streams here once it is there; it is `refused` if there was no room."""
        code, stack = libc.Pointer(self.code.at), libc.Pointer(self.area.at + SIZE - 16 & -16)
        calls, child = libc.Pointer(self.list), libc.Pointer(self.area.at)
        self.refused = libc.call("clone", code, stack, CLONE, calls, child) < 0
        for fd in streams:
            os.close(fd)

    def child(self) -> int:
        """Returns its process; 0 as long as there is none."""
        return int.from_bytes(self.area.read(0, 4), "little")

    def expose(self) -> None:
        """It is ended before its keeper when memory ends. The file is descriptor 0, the lowest one free."""
        self.call(CLOSE, 0)
        self.call(OPEN, self.text(FIRST_TO_END), os.O_WRONLY)
        self.call(WRITE, 0, self.put(b"1000"), 4)

    def prepare(self, streams: list[int], state: int | None) -> None:
        """The child is a session of its own, with streams, signals and limits as a program expects them."""
        nothing = self.put(bytes(32))
        self.call(SETSID)
        for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT):
            self.call(SIGACTION, number, nothing, 0, SIGSET)
        self.call(SIGPROCMASK, SIG_SETMASK, nothing, 0, SIGSET)
        for target, fd in enumerate(streams[:3]):
            self.call(DUP2, fd, target)
        if state is not None and state == streams[-1]:
            self.call(FCNTL, state, F_SETFD, 0)
        elif state is not None:
            self.call(DUP2, streams[-1], state)
        for number, value in self.limits:
            self.call(PRLIMIT, 0, number, self.put(value), 0)
        self.call(UMASK, 0o022)

    def become(self, uid: int | None) -> None:
        """It has its user and nothing of the keeper's power."""
        if uid is None:
            return
        tag = self.config["tag"]
        self.call(SETGROUPS, int(tag > 0), self.put(struct.pack("q", tag)))
        self.call(SETRESGID, uid, uid, uid)
        self.call(SETRESUID, uid, uid, uid)
        self.call(CAPSET, self.put(struct.pack("II", libc.CAPABILITY_VERSION, 0)), self.put(bytes(24)))

    def execute(self, argv: list[str], env: dict[str, str]) -> None:
        """It executes the program, found by the PATH of `env`."""
        words = self.array([os.fsencode(word) for word in argv])
        variables = self.array([os.fsencode(name + "=" + value) for name, value in env.items()])
        folders = [""] if "/" in argv[0] else [(folder or ".") + "/" for folder in env["PATH"].split(":")]
        for folder in folders:
            self.call(EXECVE, self.text(folder + argv[0]), words, variables)

    def call(self, *words: int) -> None:
        """Adds a system call."""
        self.calls.append((*words, 0, 0, 0, 0)[:5])  # type: ignore[arg-type]

    def lay(self) -> int:
        """Puts the calls in place: one that fails leads to the end, a program not found to the next."""
        self.calls += [(GETPID, 0, 0, 0, 0), (EXIT_GROUP, 127, 0, 0, 0)]
        last = len(self.calls) - 2
        self.first = self.end
        data = [
            CALL.pack(*call, 1, CALL.size * (1 if number >= self.argv else last - number))
            for number, call in enumerate(self.calls)
        ]
        return self.put(b"".join(data))

    def put(self, data: bytes) -> int:
        """Puts bytes into the area; returns their address."""
        place, self.end = self.end, self.end + (len(data) + 7 & -8)
        if self.end > SIZE - STACK:
            raise OSError(7, "too many words for a command")
        self.area.write(place, data)
        return self.area.at + place

    def text(self, value: str) -> int:
        """Puts a text into the area."""
        return self.put(os.fsencode(value) + b"\0")

    def array(self, texts: list[bytes]) -> int:
        """Puts texts into the area, and their addresses after them."""
        places = [self.put(text + b"\0") for text in texts]
        return self.put(struct.pack(str(len(places) + 1) + "q", *places, 0))

    def problem(self) -> int:
        """Returns the error with which no program could be started, below 0 if that of its folder; else 0."""
        results = [
            CALL.unpack(self.area.read(self.first + CALL.size * number, CALL.size))[5]
            for number in range(len(self.calls) - 1)
        ]
        if results[-1] == 1:  # the end of the list was not reached
            return 0
        tried = [-result for result in results[:-1] if result < 0]
        if results[self.argv - 1] < 0:
            return -tried[0]
        return next((error for error in reversed(tried) if error not in NOT_THERE), tried[-1])
