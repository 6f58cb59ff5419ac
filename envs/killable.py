"""Plain functions under a hard time limit: a verifier that never returns must not hold up its group.

A thread cannot be killed, and neither can a loop inside a C function (`9**9**9**9`) be interrupted. So a
function runs in a helper process that imports it by reference and stays for the next call; at the limit the
process is killed. The helper also arms a kernel timer for itself, so that it dies even when its parent has.

A function that no other process can import (a closure, one typed into a prompt) runs in a thread instead; at
the limit its result is given up, and the thread is left behind.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import inspect
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from envs.plugins import load_module

TIMEOUT_S = 10.0
START_S = 60.0
MEMORY_BYTES = 4 << 30
_HEADER = struct.Struct("!Q")


class VerifierError(RuntimeError):
    """A verifier failed: its own error, or the end of its process. Says nothing about the answer judged."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Where another process finds a function."""

    module: str
    path: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Reference | None:
        """Returns the reference of a module-level function in a file, else None."""
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "<none>")
        path = getattr(sys.modules.get(module), "__file__", None)
        if "<" in name or path is None or not Path(path).is_file():
            return None
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part, None)
        return cls(module, str(Path(path).resolve()), name) if found is function else None

    def load(self) -> Callable[..., Any]:
        """Imports the function here, by module name when that leads to the same file, else by file."""
        module = self._by_name() or load_module(Path(self.path))
        value: Any = module
        for part in self.qualname.split("."):
            value = getattr(value, part)
        return value

    def _by_name(self) -> Any:
        if self.module == "__main__":
            return None
        try:
            module = importlib.import_module(self.module)
        except ImportError:
            return None
        path = getattr(module, "__file__", None)
        return module if path is not None and str(Path(path).resolve()) == self.path else None


async def call_killable(function: Callable[..., Any], arguments: Sequence[Any], *, timeout_s: float) -> Any:
    """Calls a plain function with a hard time limit, without blocking the event loop.

    Raises:
        TimeoutError: The limit passed; the function no longer runs (unless it had to run in a thread).
        VerifierError: The function raised, or its process ended.
    """
    reference = Reference.of(function)
    if reference is None:
        return await asyncio.wrap_future(_call_in_thread(function, arguments, timeout_s))
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_callers, call_blocking, reference, arguments, timeout_s)


def call_blocking(reference: Reference, arguments: Sequence[Any], timeout_s: float) -> Any:
    """The blocking form of `call_killable`; may be called from any thread."""
    helper = _take()
    try:
        ok, value = helper.call((tuple(sys.path), reference, tuple(arguments), timeout_s), timeout_s)
    except BaseException:
        helper.kill()
        raise
    with _lock:
        _idle.append(helper)
    if not ok:
        raise VerifierError(value)
    return value


class _Helper:
    """One helper process; it ends when its input ends."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONSAFEPATH": "1",
        }
        command = [sys.executable, "-c", "from envs.killable import serve; serve()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._receive(time.monotonic() + START_S)

    @property
    def alive(self) -> bool:
        """Says whether the process still runs."""
        return self._process.poll() is None

    def call(self, request: Any, timeout_s: float) -> Any:
        """Sends one request and waits for its answer."""
        data = pickle.dumps(request)
        try:
            self._input.write(_HEADER.pack(len(data)) + data)
            self._input.flush()
        except BrokenPipeError as error:
            raise VerifierError("the verifier's process ended") from error
        return self._receive(time.monotonic() + timeout_s)

    def kill(self) -> None:
        """Kills the process with all it started, and reaps it."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def _receive(self, deadline: float) -> Any:
        (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
        return pickle.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            if not select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            chunk = os.read(self._output.fileno(), size - len(data))
            if not chunk:
                raise VerifierError(f"the verifier's process ended (exit code {self._process.wait()})")
            data += chunk
        return data


_callers = ThreadPoolExecutor(2 * (os.cpu_count() or 1) + 2, thread_name_prefix="verifier")
_idle: list[_Helper] = []
_lock = threading.Lock()


def close_helpers() -> None:
    """Ends the idle helper processes; they also end by themselves with this process."""
    with _lock:
        helpers, _idle[:] = list(_idle), []
    for helper in helpers:
        helper.kill()


atexit.register(close_helpers)


def _take() -> _Helper:
    while True:
        with _lock:
            helper = _idle.pop() if _idle else None
        if helper is None:
            return _Helper()
        if helper.alive:
            return helper
        helper.kill()


def _call_in_thread(function: Callable[..., Any], arguments: Sequence[Any], timeout_s: float) -> Future[Any]:
    future: Future[Any] = Future()

    def settle(error: BaseException | None, value: Any = None) -> None:
        with settled:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def work() -> None:
        try:
            value = function(*arguments)
        except Exception as error:
            settle(VerifierError(f"{type(error).__name__}: {error}"))
        else:
            settle(None, value)
        timer.cancel()

    settled = threading.Lock()
    timer = threading.Timer(timeout_s, settle, [TimeoutError()])
    timer.daemon = True
    timer.start()
    threading.Thread(target=work, name="verifier", daemon=True).start()
    return future


def serve() -> None:
    """The helper's main loop: one request, one answer. Output of the functions goes to standard error."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _limit_memory()
    _send(sink, "ready")
    while header := source.read(_HEADER.size):
        sys.path[:], reference, arguments, timeout_s = pickle.loads(source.read(_HEADER.unpack(header)[0]))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1.0)
        answer = _answer(reference, arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(sink, answer)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


_load = cache(Reference.load)


def _answer(reference: Reference, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        value = _load(reference)(*arguments)
        pickle.dumps(value)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return (False, "returned an awaitable") if inspect.isawaitable(value) else (True, value)


def _send(sink: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    sink.write(_HEADER.pack(len(data)) + data)
    sink.flush()
