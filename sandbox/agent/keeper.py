"""Zygote and keepers: how commands are forked, and how a command ends with everything that came of it.

A keeper is a child subreaper: orphans of its command return to it, double-forked daemons included. It ends
the tree when the agent shuts its side of their socket, or is gone. Once nothing is left of its command it
takes the next one: half of the forks are then saved, and its memory is its own already. A brief command
(Python source) has a user of its own while it runs, so that one signal, which no fork escapes, ends all that
is left of it; its keeper, which becomes that user, ends with it.
"""

from __future__ import annotations

import _thread
import errno
import gc
import os
import select
import struct
import time
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, socket

from . import libc, small_json
from .command import disk_full
from .files import remove_tree
from .frames import DIRECT, DIRTY, DONE, EXITED, FAILED, FORK, FREE, FULL, SCRATCH, STATUS, UNKNOWN, UNMADE
from .fresh import end_others, enter
from .program import ENVIRONMENT, become_command, import_common, warm_up
from .spawn import Spawner

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import NoReturn

    from .frames import Header
else:
    import _signal as signal  # without enumerations, which cost more than all else here

CLEAN_S, FRESH_NS, MOMENT_S = 2.0, 50_000_000, 0.00005

NOBODY = -1
"""A user who has no files."""

MISSING = 127
"""How a child ends whose program is not there."""

SIGNAL_INFO = 128
TAG = 1 << 20
"""Where the kernel (an old gVisor) has no subreapers, commands carry a group of their own above this number,
which no command can shed and every child inherits."""


def serve_forks(channel: socket, config: Header) -> NoReturn:
    """The zygote: forks a keeper for every message of the agent, and warms up beside the first command.

    What it needs is its own then before any command can have taken all of the sandbox's memory. What most
    programs import costs ten times as much: it is there only where every call is Python in memory of its own.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ENVIRONMENT.update(config.get("env") or {})
    waiting, tag = select.poll(), TAG
    stages, used = [warm_up, *([import_common] if config["fresh"] else [])], False
    waiting.register(channel.fileno(), select.POLLIN)
    while True:
        while used and stages and not waiting.poll(0):  # whoever waits already goes first
            stages.pop(0)()
            gc.freeze()
        tag += 1
        work, fds = receive(channel)
        if work is None:
            os._exit(0)
        used = True
        keeper = socket(fileno=fds.pop())
        try:
            if os.fork() == 0:
                channel.close()
                keep(keeper, fds, work, {**config, "tag": tag})
        except OSError as error:
            keeper.send(STATUS.pack(FAILED, error.errno or 0))
        keeper.close()
        for fd in fds:
            os.close(fd)


class Work:
    """What a keeper is to do: for whom, and the job, unless a fork is to wait for it."""

    def __init__(self, data: bytes):
        self.slot, self.user = FORK.unpack_from(data)
        self.job = data[FORK.size :]

    def uid(self, config: Header) -> int | None:
        """Returns the user that the command is to have."""
        return (self.user or config["uid"] + self.slot) if config["uid"] is not None else None


def receive(channel: socket) -> tuple[Work | None, list[int]]:
    """Receives what is to be started, with its descriptors; nothing when the other side is gone."""
    data, parts, _, _ = channel.recvmsg(FORK.size + DIRECT, CMSG_SPACE(20), MSG_CMSG_CLOEXEC)
    if not data or not parts:
        return None, []
    return Work(data), [*struct.unpack(str(len(parts[0][2]) // 4) + "i", parts[0][2])]


def keep(agent: socket, streams: list[int], work: Work, config: Header) -> NoReturn:
    """The keeper: runs a command, reaps its orphans, and ends its tree when the agent asks or is gone."""
    try:
        if config["fresh"]:
            enter(config["fresh"])
        os.setsid()
        if libc.call("prctl", libc.PR_SET_CHILD_SUBREAPER, 1, None, None, None) == 0:
            config["tag"] = 0
        deaths = watch_children()
        if work.slot:
            run_call(agent, deaths, streams, work, config)
        else:
            Keeper(agent, deaths, config).run(work, streams)
    except OSError as error:
        agent.send(STATUS.pack(FAILED, error.errno or 0))
    finally:
        os._exit(0)


def run_call(agent: socket, deaths: int, streams: list[int], work: Work, config: Header) -> None:
    """Runs a call of Python under a user of its own, and takes away what it leaves."""
    uid = work.uid(config)
    before = stamps() if not config["fresh"] else []
    child = forked(streams, uid, True, config)
    if config["fresh"]:
        status = attend(agent, deaths, child, 0)
        end_tree(0)
        if status and disk_full():  # a disk that nobody but this call has
            agent.send(STATUS.pack(FULL, 0))
        agent.send(STATUS.pack(DONE, UNKNOWN if status is None else status))
    else:
        if uid is not None:
            clean(NOBODY, [])  # what it needs is in memory when it counts; the call may have files already
        status = attend(agent, deaths, child, config["tag"])
        end_user(uid, config["tag"])
        left = uid is not None and not clean(uid, before)
        agent.send(STATUS.pack(DIRTY if left else DONE, UNKNOWN if status is None else status))


def forked(streams: list[int], uid: int | None, brief: bool, config: Header) -> int:
    """Forks a command that waits for its job on its standard input."""
    child = os.fork()
    if child == 0:
        become_command(streams, uid, brief, config)
    for fd in streams:
        os.close(fd)
    return child


class Keeper:
    """One that has a command at a time, for as long as nothing is left of the last one."""

    def __init__(self, agent: socket, deaths: int, config: Header):
        self.agent, self.deaths, self.config = agent, deaths, config
        self.poller = watched(agent, deaths)
        self.spawner: Spawner | None = None

    def run(self, work: Work, streams: list[int]) -> None:
        """Runs one command after another; returns when one leaves something that is ended with its keeper."""
        following: Work | None = work
        while following is not None:
            child = self.start(following, streams)
            if not self.accompany(child, self.spawner if following.job else None):
                return
            following, streams = receive(self.agent)

    def start(self, work: Work, streams: list[int]) -> int:
        """Starts a command: a program at once, or a fork that waits."""
        uid = work.uid(self.config)
        if not work.job:
            return forked(streams, uid, False, self.config)
        spawner = self.spawner = self.spawner or Spawner(self.config)
        spawner.lay_out(small_json.loads(work.job), streams, uid)
        try:
            _thread.start_new_thread(spawner.start, (streams,))
        except RuntimeError as error:
            raise BlockingIOError(errno.EAGAIN, "no room for a thread") from error
        while not (child := spawner.child()):
            if spawner.refused:
                raise BlockingIOError(errno.EAGAIN, "no room for a process")
            time.sleep(MOMENT_S)  # in which the thread begins
        return child

    def accompany(self, child: int, spawner: Spawner | None) -> bool:
        """Waits until the tree of `child` has ended, and tells; returns whether the keeper is free again."""
        agent, tag, known = self.agent, self.config["tag"], False
        while True:
            ready = [fd for fd, _ in self.poller.poll()]
            alive, status = reap(child)
            if status == MISSING and spawner is not None and (problem := spawner.problem()):
                agent.send(STATUS.pack(UNMADE, problem))
            if not alive and not tag:
                agent.send(STATUS.pack(FREE, UNKNOWN if status is None else status))
                os.read(self.deaths, SIGNAL_INFO)
                return True
            if status is not None:
                known = True
                agent.send(STATUS.pack(EXITED, status))
            if not alive:
                return False
            if self.deaths in ready:
                os.read(self.deaths, SIGNAL_INFO)
            if agent.fileno() in ready and not obeyed(agent, 0 if known else child, tag):
                return False


def watch_children() -> int:
    """Returns a descriptor that can be read when a child has ended, without a handler that interrupts."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    return libc.signalfd(signal.SIGCHLD)


def attend(agent: socket, deaths: int, child: int, tag: int) -> int | None:
    """Waits until a brief command has ended, and returns how; None if its tree was ended instead."""
    poller = watched(agent, deaths)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if deaths in ready:
            os.read(deaths, SIGNAL_INFO)
        alive, status = reap(child)
        if status is not None or not alive:
            return status
        if agent.fileno() in ready and not obeyed(agent, child, tag):
            return None


def watched(agent: socket, deaths: int) -> select.poll:
    """Returns what waits for a word of the agent, or a death."""
    poller = select.poll()
    for fd in (agent.fileno(), deaths):
        poller.register(fd, select.POLLIN)
    return poller


def obeyed(agent: socket, child: int, tag: int) -> bool:
    """Sends the signal that the agent asks for; if it asks for the end instead, ends the tree: False."""
    asked = agent.recv(STATUS.size)
    if not asked:
        end_tree(tag)
        return False
    if child:
        send_group(child, STATUS.unpack(asked)[1])
    return True


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


def end_user(uid: int | None, tag: int) -> None:
    """Ends everything that runs as `uid`, in one step that no fork escapes; without users, the tree."""
    if uid is None:
        end_tree(tag)
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


def end_tree(tag: int) -> None:
    """Ends every descendant. All are stopped first and hold their places, so that no storm goes on.

    Called by the first process of a namespace, it ends all others there in one step that no fork escapes.
    """
    if os.getpid() == 1:
        end_others()
        return
    stopped: set[int] = set()
    while fresh := descendants(os.getpid(), tag) - stopped:
        send_all(fresh, signal.SIGSTOP)
        stopped |= fresh
    while True:
        left = descendants(os.getpid(), tag)
        send_all(left, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            if not tag or not left:
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


def descendants(root: int, tag: int) -> set[int]:
    """Returns all processes below `root`, from /proc, and those that carry `tag`."""
    parents: dict[int, int] = {}
    tagged: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat", "rb") as file:
                    state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
                parents[int(name)] = int(parent)
                if tag and state != b"Z" and tag in groups("/proc/" + name + "/status"):
                    tagged.add(int(name))
            except (OSError, ValueError):
                continue
    found, fresh = {root} | tagged, {root} | tagged
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in found} - found
        found |= fresh
    return found - {root}


def groups(path: str) -> set[int]:
    """Returns the supplementary groups that a status file of /proc tells."""
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b"Groups:"):
                return {int(word) for word in line.split()[1:]}
    return set()


def stamps() -> list[int]:
    """Returns when the scratch folders last changed; -1 when too short ago to tell a later change."""
    now = time.time_ns()
    times: list[int] = []
    for folder in SCRATCH:
        try:
            changed = os.stat(folder).st_mtime_ns
        except FileNotFoundError:
            changed = 0
        times.append(changed if now - changed > FRESH_NS else -1)
    return times


def clean(uid: int, before: list[int]) -> bool:
    """Removes the files that `uid` left in the scratch folders; returns whether nothing is left.

    A folder that has not changed since `before` has none.
    """
    deadline = time.monotonic() + CLEAN_S
    try:
        after = stamps() if before else []
        for place, folder in enumerate(SCRATCH):
            if before and before[place] == after[place] >= 0:
                continue
            if os.path.isdir(folder):
                for path in belongings(folder, uid):
                    remove(path, deadline)
    except OSError:
        return False
    return True


def belongings(folder: str, uid: int) -> list[str]:
    """Returns the paths in a folder that belong to `uid`."""
    found: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.stat(follow_symlinks=False).st_uid == uid:
                    found.append(entry.path)
            except FileNotFoundError:  # another's, who took it away meanwhile
                continue
    return found


def remove(path: str, deadline: float) -> None:
    """Removes a file or a tree, following no link."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
    else:
        remove_tree(path, deadline)
