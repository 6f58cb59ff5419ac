"""Processes: each side of a run is a plain object, opened in a Ray actor or in this very process.

Ray is joined only by explicit address; without one a private cluster is started on this machine, without
dashboard or usage report, in a namespace of its own, and it ends with the driver.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from rl.leftovers import end_leftovers, mark, unmark
from rl.weights import WeightSnapshot

Open = Callable[..., AbstractAsyncContextManager[Any]]
_LOCAL_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONSAFEPATH": "1",
}


class Host:
    """Holds the object that a context manager opens, and calls its methods by name."""

    def __init__(self, log_file: str = ""):
        unmark()  # a sandbox node that this process starts belongs to no driver
        self._stack = AsyncExitStack()
        self._object: Any = None
        if log_file:
            _log_to(Path(log_file))

    async def start(self, open_object: Open, *args: Any) -> int:
        """Opens the object and returns this process's id."""
        self._object = await self._stack.enter_async_context(open_object(*args))
        return os.getpid()

    async def call(self, name: str, *args: Any) -> Any:
        """Calls one method, awaiting it when it is asynchronous."""
        result = getattr(self._object, name)(*args)
        return await result if inspect.isawaitable(result) else result

    async def stop(self) -> None:
        """Closes the object."""
        await self._stack.aclose()


@dataclass(frozen=True, slots=True)
class Remote:
    """A hosted object as its user sees it: every method is awaitable and takes positional arguments."""

    call: Callable[..., Awaitable[Any]]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        def method(*args: Any) -> Awaitable[Any]:
            return self.call(name, *args)

        return method


@dataclass(frozen=True, slots=True)
class Cluster:
    """Starts hosts: as Ray actors, or (`ray_actors` False) in this process."""

    log_folder: Path
    ray_actors: bool = True

    async def open(self, role: str, open_object: Open, *args: Any) -> Process:
        """Starts a process of this role and opens its object there."""
        log_file = str(self.log_folder / f"{role}.log")
        if not self.ray_actors:
            host = Host()
            await host.start(open_object, *args)
            return Process(role, Remote(host.call), host.call, host.stop)
        options = {"num_cpus": 0, "max_concurrency": 64, "name": role}
        actor: Any = ray.remote(Host).options(**options).remote(log_file)
        await actor.start.remote(open_object, *args)

        async def stop() -> None:
            await actor.stop.remote()
            with suppress(ray.exceptions.RayActorError):  # how an actor that ends says so
                await actor.__ray_terminate__.remote()

        return Process(role, Remote(actor.call.remote), actor.call.remote, stop)


@dataclass(frozen=True, slots=True)
class Process:
    """One side of a run: `remote` is a `Remote` of its object, `stop` closes it."""

    role: str
    remote: Any
    call: Callable[..., Awaitable[Any]]
    stop: Callable[[], Awaitable[None]]


async def publish(learner: Process, generator: Process) -> dict[str, float]:
    """Moves the learner's weights to the generator, without a stop in the driver; returns metrics."""
    started = time.monotonic()
    snapshot = learner.call("snapshot")
    if not isinstance(snapshot, ray.ObjectRef):
        snapshot = await snapshot
        assert isinstance(snapshot, WeightSnapshot)
    await generator.call("load_weights", snapshot)
    return {"weight_sync_s": time.monotonic() - started}


def start_ray(address: str, namespace: str, object_store_bytes: int) -> None:
    """Starts a private cluster on this machine, or joins the one at `address`.

    Raises:
        ConnectionError: No cluster answers at `address`.
    """
    common: dict[str, Any] = {
        "namespace": namespace,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    with _own_signals():
        if address:
            ray.init(address=address, **common)
        else:
            _start_private(object_store_bytes, common)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps this process's signal handlers: Ray puts its own in their place, which abort the driver."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not set from Python, and so not to be set back
                signal.signal(number, handler)


def _start_private(object_store_bytes: int, common: dict[str, Any]) -> None:
    os.environ.update(_LOCAL_ENV)
    mark()
    paths = [path for path in sys.path if path and Path(path, "rl", "actors.py").exists()]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=os.cpu_count(),
            object_store_memory=object_store_bytes,
            **common,
        )
    finally:
        unmark()


def stop_ray() -> None:
    """Ends what `start_ray` started; actors end with it."""
    ray.shutdown()
    end_leftovers(own=True)


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
