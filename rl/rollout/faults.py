"""Errors as data: one place types an exception by the boundary at which it arose.

Code behind a boundary (engine, sandbox, environment, scaffold, reward) raises what it likes. Only a fault
of the policy's own tool call is an observation; everything else here ends the sample without a score.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from envs.types import Boundary, ErrorInfo, StopReason


class Fault(Exception):
    """A sample cannot go on, and the policy is not to blame."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(f"{info.boundary}: {info.type}: {info.message}")
        self.info = info


class EpisodeEnded(Exception):
    """A limit of the framework ends the episode, whatever the scaffold meant to do next."""

    def __init__(self, stop: StopReason) -> None:
        super().__init__(f"the episode ended: {stop}")
        self.stop = stop


class Interrupted(Exception):
    """The engine gave a turn back unfinished because it closes; the sample is to be continued later."""


@contextmanager
def boundary(where: Boundary) -> Iterator[None]:
    """Turns any exception into a `Fault` of `where`; one of the fleet's own is always the sandbox's."""
    try:
        yield
    except (Fault, EpisodeEnded, Interrupted):
        raise
    except Exception as error:
        found = Boundary.SANDBOX if is_sandbox_error(error) else where
        raise Fault(ErrorInfo(found, type(error).__name__, str(error))) from error


def is_sandbox_error(error: BaseException) -> bool:
    """Whether the fleet raised it, also through a subclass in a backend of somebody else's."""
    return any(base.__module__.partition(".")[0] == "sandbox" for base in type(error).__mro__)
