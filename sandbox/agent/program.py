"""The command itself: a fresh fork that takes its streams, user and limits, and does what was asked."""

from __future__ import annotations

import binascii
import builtins
import errno
import os
import resource
import sys

from . import files, libc, small_json
from .frames import CHUNK, JOB

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn

    from .frames import Header
else:
    import _signal as signal  # without enumerations, which cost more than all else here

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/workspace", "LANG": "C.UTF-8"}


def become_command(streams: list[int], uid: int | None, brief: bool, config: Header) -> NoReturn:
    """Turns a fresh fork into the command: its streams, its user and limits, nothing else of the agent."""
    code = 127
    try:
        os.setsid()
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        close_above(len(streams) - 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if uid is not None:  # without root the agent has done so: its own files in /proc are closed to it now
            write_once("/proc/self/oom_score_adj", b"1000")
        for name, value in config["rlimits"].items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        os.umask(0o077 if brief and not config["fresh"] else 0o022)
        # What a job will need is done once for nothing: pages are copied before its caller waits.
        perform(small_json.loads('{"op": "nothing", "cwd": "/", "env": {"A": "b"}}'))
        if brief:
            open_streams()
            run_source(b"print('', end='')")
        else:
            vainly_become()
        text = read_exactly(JOB.unpack(read_exactly(JOB.size))[0])
        give_up_power(uid, config)  # not before: no signal of other commands reaches one that waits
        job = small_json.loads(text)
        code = perform(job)
    except BaseException as error:
        os.write(2, (type(error).__name__ + ": " + str(error) + "\n").encode())
    finally:
        os._exit(code)


def give_up_power(uid: int | None, config: Header) -> None:
    """Becomes the user of the command, for good, and lets others of that user reach this process."""
    if config["fresh"] and config["seccomp"]:
        libc.filter_calls(binascii.a2b_base64(config["seccomp"]))
    if uid is not None:
        os.setgroups([config["tag"]] if config["tag"] else [])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        libc.drop_capabilities()
    libc.prctl(libc.PR_SET_DUMPABLE, 1)


def write_once(path: str, data: bytes) -> None:
    """Writes a file of the kernel, without the layers of a Python file."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, data)
    os.close(fd)


def close_above(last: int) -> None:
    """Closes every descriptor but the streams, which come first."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > last:
            try:  # noqa: SIM105
                os.close(int(name))
            except OSError:  # the listing's own
                pass


def read_exactly(size: int) -> bytes:
    """Reads `size` bytes of standard input without reading ahead."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            raise EOFError("the job was cut short")
        data += more
    return data


def perform(job: Header) -> int:
    """Does what was asked for, and returns the exit code."""
    if "files" in job:
        place_files(job["files"])
    os.chdir(job.get("cwd", "/workspace"))
    if job["op"] in ("exec", "start"):
        if job.get("pty"):
            take_terminal()
        elif job.get("state"):
            os.dup2(3, job["state"])
            os.close(3)
        become(job["argv"], {**ENVIRONMENT, **job["env"]})
    if job["op"] == "python":
        return run_source(read_exactly(job["source_bytes"]))
    if job["op"] == "read":
        return copy_out(job["path"], job["max_bytes"], job.get("at", -1))
    if job["op"] == "write":
        return copy_in(job["path"], job["mode"] & 0o777, job.get("at", 0))
    if job["op"] in ("list", "stat", "pack", "unpack", "remove", "move"):
        return files.perform(job)
    if job["op"] == "nothing":
        return 0
    raise ValueError("unknown operation " + repr(job["op"]))


def become(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Executes a program found by the PATH of `env`; `os.execvpe` imports more than the fork itself costs."""
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    problem = FileNotFoundError(errno.ENOENT, "No such file or directory", argv[0])
    for folder in env["PATH"].split(":"):
        try:
            os.execve((folder or ".") + "/" + argv[0], argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problem = error
    raise problem


def vainly_become() -> None:
    """Goes the way of a program that starts, up to one that is not there."""
    try:
        become(["/proc/self/none"], {**ENVIRONMENT})
    except OSError:
        return


def take_terminal() -> None:
    """Makes the terminal, which is descriptor 3, the one of this session and all three streams."""
    import fcntl
    import termios

    fcntl.ioctl(3, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2):
        os.dup2(3, fd)
    os.close(3)


def warm_up() -> None:
    """Does once, ahead of the forks, what each would do first: the compiler alone sets up for 2 ms."""
    exec(compile("import os as _os; str(0.5)", "<warm>", "exec"), {})
    small_json.loads(small_json.dumps({"a": [1, 0.5, None, True, "b"]}))
    for mode in ("r", "w"):
        open(os.devnull, mode, encoding="utf-8", errors="replace").close()


def import_common() -> None:
    """Imports once, ahead of the forks, what most programs import and would wait for longest."""
    import json
    import re

    re.compile("a")
    json.loads(json.dumps({"a": [1, 0.5, None, True, "b"]}))


def open_streams() -> None:
    """Gives Python its standard streams."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115


def run_source(source: bytes) -> int:
    """Runs Python source as a main program and returns its exit code."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = type(sys)("__main__")
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)
    code = 0
    try:
        exec(compile(source, "<source>", "exec"), main.__dict__)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code == 1 and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.__excepthook__(type(error), error, trace)
        code = 1
    sys.stdout.flush()
    return code & 255


def place_files(listed: list[list[Any]]) -> None:
    """Writes the files (path, size, mode) that come ahead of all else on standard input."""
    os.chdir("/workspace")
    for path, size, mode in listed:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode & 0o777)
        while size:
            data = os.read(0, min(size, CHUNK))
            if not data:
                raise EOFError("the files were cut short")
            size -= len(data)
            os.write(fd, data)
        os.fchmod(fd, mode & 0o777)
        os.close(fd)


def copy_out(path: str, limit: int, at: int) -> int:
    """Writes a regular file to standard output, or `limit` bytes of it from `at` on.

    Without a place to begin at, a file that is larger than `limit` is refused.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(fd)
    if info.st_mode & 0o170000 != 0o100000:
        raise OSError(errno.EINVAL, "not a regular file")
    if at >= 0:
        os.lseek(fd, at, os.SEEK_SET)
        files.write_all(files.read_up_to(fd, limit))
        return 0
    if info.st_size > limit:
        raise OSError(errno.EFBIG, str(info.st_size) + " bytes are more than the limit of " + str(limit))
    copy_all(fd, 1)
    return 0


def copy_in(path: str, mode: int, at: int) -> int:
    """Writes standard input to a file, from `at` on; from its start it replaces what was there."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    how = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (0 if at else os.O_CREAT | os.O_TRUNC)
    fd = os.open(path, how, mode)
    os.lseek(fd, at, os.SEEK_SET)
    copy_all(0, fd)
    os.fchmod(fd, mode)
    return 0


def copy_all(source: int, target: int) -> None:
    """Copies one descriptor to another until its end."""
    while data := os.read(source, CHUNK):
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]
