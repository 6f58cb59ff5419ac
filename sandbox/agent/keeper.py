"""Zygote and keepers: how commands are forked, and how a command ends with everything that came of it.

A keeper is a child subreaper: orphans of its command return to it, double-forked daemons included. It ends
the tree when the agent shuts its side of their socket, or is gone. A brief command (Python source) has a
user of its own while it runs, so that one signal, which no fork escapes, ends all that is left of it.
"""

from __future__ import annotations

import array
import ctypes
import errno
import gc
import os
import select
import signal
import struct
import time
from _socket import CMSG_SPACE, socket

from .program import CHUNK, FORK, SCRATCH, become_command, warm_up

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .program import Header

STATUS = struct.Struct("!Bi")
EXITED, FAILED, DIRTY, DONE, SIGNAL = 0, 1, 2, 3, 4
CLEAN_S = 2.0
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def serve_forks(channel: socket, config: Header) -> NoReturn:
    """The zygote: forks a keeper for every message of the agent."""
    warm_up()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, parts, _, _ = channel.recvmsg(FORK.size, CMSG_SPACE(20))
        if not data:
            os._exit(0)
        fds = array.array("i", parts[0][2])
        keeper = socket(fileno=fds[3])
        try:
            if os.fork() == 0:
                channel.close()
                slot, user = FORK.unpack(data)
                keep(keeper, [*fds[:3], *fds[4:]], slot, user, config)
        except OSError as error:
            keeper.send(STATUS.pack(FAILED, error.errno or 0))
        keeper.close()
        for fd in (*fds[:3], *fds[4:]):
            os.close(fd)


def keep(agent: socket, streams: list[int], slot: int, user: int, config: Header) -> NoReturn:
    """The keeper: runs a command, reaps its orphans, and ends its tree when the agent asks or is gone."""
    try:
        os.setsid()
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        signal.signal(signal.SIGCHLD, wake)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        uid = (user or config["uid"] + slot) if config["uid"] is not None else None
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            become_command(streams, uid, bool(slot), config)
        for fd in streams:
            os.close(fd)
        if slot and uid is not None:
            clean(uid)  # nothing is there yet: what it needs is in memory when it counts
        attend(agent, wake_r, child, bool(slot))
        if slot:
            end_user(uid)
            left = uid is not None and not clean(uid)
            agent.send(STATUS.pack(DIRTY if left else DONE, 0))
    except OSError as error:
        agent.send(STATUS.pack(FAILED, error.errno or 0))
    finally:
        os._exit(0)


def wake(number: int, frame: object) -> None:
    """Lets a signal interrupt what waits; the wake-up descriptor says that it came."""


def attend(agent: socket, wake: int, child: int, brief: bool) -> None:
    """Waits until the tree of `child` has ended, or for a `brief` command until `child` has."""
    poller, running = select.poll(), True
    for fd in (agent.fileno(), wake):
        poller.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if wake in ready:
            os.read(wake, CHUNK)
        alive, status = reap(child)
        if status is not None:
            running = False
            agent.send(STATUS.pack(EXITED, status))
        if not alive or (brief and status is not None):
            return
        if agent.fileno() in ready:
            asked = agent.recv(STATUS.size)
            if not asked:
                end_tree()
                return
            if status is None and running:
                send_group(child, STATUS.unpack(asked)[1])


def reap(child: int) -> tuple[bool, int | None]:
    """Reaps what ended; returns whether anything is left, and the exit code (or minus signal) of `child`."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, found
        if pid == 0:
            return True, found
        if pid == child:
            found = os.waitstatus_to_exitcode(status)


def end_user(uid: int | None) -> None:
    """Ends everything that runs as `uid`, in one step that no fork escapes; without users, the tree."""
    if uid is None:
        end_tree()
        return
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    while True:
        try:  # noqa: SIM105 (contextlib is not imported in a sandbox)
            os.kill(-1, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def end_tree() -> None:
    """Ends every descendant. All are stopped first and hold their places, so that no storm goes on."""
    stopped: set[int] = set()
    while fresh := descendants(os.getpid()) - stopped:
        send_all(fresh, signal.SIGSTOP)
        stopped |= fresh
    while True:
        send_all(descendants(os.getpid()), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def send_all(pids: set[int], number: int) -> None:
    """Sends a signal to processes, of which some may have ended."""
    for pid in pids:
        try:  # noqa: SIM105 (contextlib is not imported in a sandbox)
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def send_group(leader: int, number: int) -> None:
    """Sends a signal to a process and its group; a moment after its start it has none yet."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        send_all({leader}, number)


def descendants(root: int) -> set[int]:
    """Returns all processes below `root`, from /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found, fresh = {root}, {root}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in found} - found
        found |= fresh
    return found - {root}


def clean(uid: int) -> bool:
    """Removes the files that `uid` left in the scratch folders; returns whether nothing is left."""
    deadline = time.monotonic() + CLEAN_S
    try:
        for folder in filter(os.path.isdir, SCRATCH):
            with os.scandir(folder) as entries:
                mine = [entry.path for entry in entries if entry.stat(follow_symlinks=False).st_uid == uid]
            for path in mine:
                remove(path, None, deadline)
    except (OSError, RecursionError):
        return False
    return True


def remove(name: str, parent: int | None, deadline: float) -> None:
    """Removes a file or a tree, following no link."""
    if time.monotonic() > deadline:
        raise TimeoutError(errno.ETIMEDOUT, "too many files")
    try:
        os.unlink(name, dir_fd=parent)
        return
    except IsADirectoryError:
        pass
    os.chmod(name, 0o700, dir_fd=parent)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        for inner in os.listdir(fd):
            remove(inner, fd, deadline)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
