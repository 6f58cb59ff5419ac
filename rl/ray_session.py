"""Ray for one run: a private cluster on this machine that ends with the driver, or one by explicit address.

A private cluster has no dashboard and reports no usage. In either the run has a namespace of its own, and
only an explicit address joins: neither an environment variable nor a cluster that happens to run here.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from rl.leftovers import end_leftovers, mark, unmark

_LOCAL_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONSAFEPATH": "1",
}
_STARTS = 3


def start_ray(address: str, namespace: str, object_store_bytes: int, cpus: float) -> None:
    """Starts a private cluster on this machine, or joins the one at `address`.

    The processes of a private cluster share the machine's cores: it counts as many as they ask for (`cpus`).

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
            _start_private(object_store_bytes, cpus, common)


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


def _start_private(object_store_bytes: int, cpus: float, common: dict[str, Any]) -> None:
    os.environ.update(_LOCAL_ENV)
    mark()
    paths = [path for path in sys.path if path and Path(path, "rl", "actors.py").exists()]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    cores = max(os.cpu_count() or 1, math.ceil(cpus))
    try:
        for attempt in range(_STARTS):
            try:
                _init_local(object_store_bytes, cores, common)
                return
            except Exception as error:  # Ray's own wait of 30 s is too short for a machine that is busy
                if attempt + 1 == _STARTS or "timed out during startup" not in str(error):
                    raise
                stop_ray()
                mark()
    finally:
        unmark()


def _init_local(object_store_bytes: int, cores: int, common: dict[str, Any]) -> None:
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=cores,
        object_store_memory=object_store_bytes,
        **common,
    )


def stop_ray() -> None:
    """Ends what `start_ray` started; actors end with it."""
    ray.shutdown()
    end_leftovers(own=True)
