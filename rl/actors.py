"""Processes: each side of a run is a plain object, opened in a Ray actor or in this very process.

A process that dies is noticed by its next call, which raises; who called decides what becomes of its work.
One that is told to end (SIGTERM, or `preempt`) closes its object first, which stops at a token boundary.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import operator
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from rl.leftovers import unmark
from rl.placement import Bundle, Placement
from rl.restarts import ProcessDiedError

Open = Callable[..., AbstractAsyncContextManager[Any]]
_PING_S = 10.0


class Host:
    """Holds the object that a context manager opens, and calls its methods, or its parts' (`part.method`)."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._object: Any = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self, open_object: Open, *args: Any) -> int:
        """Opens the object and returns this process's id."""
        self._object = await self._stack.enter_async_context(open_object(*args))
        return os.getpid()

    async def call(self, name: str, *args: Any) -> Any:
        """Calls one method, awaiting it when it is asynchronous."""
        result = operator.attrgetter(name)(self._object)(*args)
        return await result if inspect.isawaitable(result) else result

    async def stop(self) -> None:
        """Closes the object; returns when it is closed, also for who comes second."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._stack.aclose())
        await asyncio.shield(self._closing)


class ActorHost:
    """A host in a process of its own: its event loop runs in one thread, calls wait for it in others.

    So the main thread is free for SIGTERM, a preemption notice: the object is closed, then the process ends.
    (Ray runs a class with a coroutine among its methods in another thread than the main one: this has none.)
    """

    def __init__(self, log_file: str) -> None:
        unmark()  # a sandbox node that this process starts belongs to no driver
        _log_to(Path(log_file))
        self._host = Host()
        self._loop = asyncio.new_event_loop()
        self._leaving: asyncio.Task[None] | None = None
        threading.Thread(target=self._loop.run_forever, name="host", daemon=True).start()
        signal.signal(signal.SIGTERM, lambda number, frame: self.preempt())

    def start(self, open_object: Open, *args: Any) -> int:
        """Opens the object and returns this process's id."""
        logging.info("process %d opens", os.getpid())
        return self._run(self._host.start(open_object, *args))

    def call(self, name: str, *args: Any) -> Any:
        """Calls one method."""
        return self._run(self._host.call(name, *args))

    def stop(self) -> None:
        """Closes the object."""
        self._run(self._host.stop())

    def ping(self) -> None:
        """Answers, which the dead do not."""

    def preempt(self) -> None:
        """Gives notice: the object stops at a token boundary and persists its work, then the process ends."""
        self._loop.call_soon_threadsafe(self._notice)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _notice(self) -> None:
        if self._leaving is None:
            self._leaving = self._loop.create_task(_leave(self._host))


async def _leave(host: Host) -> None:
    try:
        await host.stop()
    except Exception:
        logging.exception("the end after a preemption notice was not clean")
    finally:
        os._exit(0)  # an orderly end would wait for calls that wait for samples


@dataclass(frozen=True, slots=True)
class Remote:
    """A hosted object as its user sees it: every method is awaitable and takes positional arguments."""

    call: Callable[..., Awaitable[Any]]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        def method(*args: Any) -> Awaitable[Any]:
            return self.call(name, *args)

        return method


class Process:
    """One process of a run; this kind is hosted in the process that asks."""

    def __init__(self, role: str, host: Host) -> None:
        self.role = role
        self._host = host

    @property
    def remote(self) -> Any:
        """The hosted object, all of whose methods are awaitable."""
        return Remote(self.call)

    async def call(self, name: str, *args: Any) -> Any:
        """Calls a method of the hosted object. Raises ProcessDiedError when the process is gone."""
        return await self._host.call(name, *args)

    async def refer(self, name: str, *args: Any) -> Any:
        """Calls a method whose result is only passed on, as an argument of another process's call."""
        return await self.call(name, *args)

    async def stop(self) -> None:
        """Closes the object and ends the process."""
        await self._host.stop()

    async def kill(self) -> None:
        """Ends the process at once, whatever it does."""
        await self.stop()

    async def preempt(self) -> None:
        """Gives the process notice: it persists what it does and ends."""
        await self.stop()


_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
)
"""How Ray says that a process, or what it had kept for others, is gone."""


class ActorProcess(Process):
    """A process that is a Ray actor."""

    def __init__(self, role: str, actor: Any) -> None:
        self.role = role
        self._actor = actor

    async def start(self, open_object: Open, *args: Any) -> int:
        """Opens the object there and returns the process's id."""
        return await self._known(self._actor.start.remote(open_object, *args))

    async def call(self, name: str, *args: Any) -> Any:
        """Calls a method of the hosted object. Raises ProcessDiedError when the process is gone."""
        return await self._known(self._actor.call.remote(name, *args))

    async def refer(self, name: str, *args: Any) -> Any:
        """Returns a reference to a result, which stays in the object store."""
        return self._actor.call.remote(name, *args)

    async def stop(self) -> None:
        """Closes the object and ends the process."""
        await self._known(self._actor.stop.remote())
        with suppress(ray.exceptions.RayActorError):  # how an actor that ends says so
            await self._actor.__ray_terminate__.remote()

    async def kill(self) -> None:
        """Ends the process at once, whatever it does."""
        await asyncio.to_thread(ray.kill, self._actor)

    async def preempt(self) -> None:
        """Gives the process notice."""
        await self._known(self._actor.preempt.remote())

    async def _known(self, reference: Awaitable[Any]) -> Any:
        """Waits for a call; tells the death of this process from that of another whose result it needs."""
        try:
            return await reference
        except _GONE as error:
            role = "process that another one waits for" if await self._lives() else self.role
            raise ProcessDiedError(role, _cause(error)) from error

    async def _lives(self) -> bool:
        try:
            async with asyncio.timeout(_PING_S):
                await self._actor.ping.remote()
        except (TimeoutError, *_GONE):
            return False
        return True


@dataclass(frozen=True, slots=True)
class Cluster:
    """Starts hosts: as Ray actors in their places, or (`placement` None) in this process."""

    log_folder: Path
    placement: Placement | None = None
    _numbers: count[int] = field(default_factory=count)

    async def open(self, role: str, bundle: Bundle, open_object: Open, *args: Any) -> Process:
        """Starts a process of this role in its bundle and opens its object there.

        Raises:
            ProcessDiedError: It died before the object was open.
        """
        if self.placement is None:
            host = Host()
            await host.start(open_object, *args)
            return Process(role, host)
        options = {"max_concurrency": 64, "name": f"{role}.{next(self._numbers)}"}
        options |= self.placement.options(bundle)
        actor: Any = ray.remote(ActorHost).options(**options).remote(str(self.log_folder / f"{role}.log"))
        process = ActorProcess(role, actor)
        try:
            await process.start(open_object, *args)
        except BaseException:  # nobody has it: it would open its object and keep it
            with suppress(Exception):
                await process.kill()
            raise
        return process


def _cause(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if "creation task" in lines[0] else lines[0]
    detail = next((line for line in lines if "exit type" in line), last)
    return detail.partition("Some common causes")[0].rstrip(" .,")[:300]


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
