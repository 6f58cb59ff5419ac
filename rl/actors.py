"""Thin Ray wrappers: each actor is a plain class (tested without Ray) in a process of its own.

Ray is joined only by explicit address; without one a private local cluster is started, with no dashboard, no
usage report and its own namespace, and it ends with the driver.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

_LOCAL_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class Remote:
    """Lets the controller await the methods of a Ray actor as it awaits those of a plain object."""

    def __init__(self, handle: Any):
        self.handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name).remote


def start_ray(address: str, namespace: str, object_store_bytes: int) -> None:
    """Starts a private local cluster, or joins the one at `address`.

    Raises:
        ConnectionError: No cluster answers at `address`.
    """
    if not address:
        os.environ.update(_LOCAL_ENV)
    import ray

    common: dict[str, Any] = {"namespace": namespace, "logging_level": logging.WARNING, "log_to_driver": False}
    if address:
        ray.init(address=address, **common)
        return
    ray.init(
        address="local", include_dashboard=False, num_cpus=4, object_store_memory=object_store_bytes, **common
    )


def stop_ray() -> None:
    """Ends what `start_ray` started; actors end with it."""
    import ray

    ray.shutdown()
