"""Runs a process of the fleet that kills itself or another one at a named place in its code.

    python -m benchmarks.sandbox_breakpoint ARM node|front|agent ARGUMENTS...

`install` wraps the functions of `PLACES`. Nothing happens until the file `ARM` names one of them, a process
and how many passes to let by; the pass after that removes the file, kills the process with SIGKILL and goes
on when it is dead, so that it dies at this place and at no other. What is wrapped stays as it is otherwise.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

_DEATH_S = 10.0


@dataclass(frozen=True, slots=True)
class Hook:
    """A function (`module:Class.method`), and whether the place is where it begins or where it has ended."""

    target: str
    when: Literal["before", "after", "half"]
    where: tuple[str, ...] = ("node",)
    """The kinds of processes in which it is wrapped."""

    op: str = ""
    """Only for requests of this operation."""


PLACES: dict[str, tuple[Hook, ...]] = {
    "create.called": (
        Hook("sandbox.client:Fleet.create", "before", ("client",)),
        Hook("sandbox.server:Front._create", "before", ("front",)),
        Hook("sandbox.node_server:NodeServer.perform", "before", ("agent",), "create"),
        Hook("sandbox.session:Session._create", "before"),
    ),
    "create.made": (
        Hook("sandbox.backends.launch:Launch.go", "before"),
        Hook("sandbox.backends.docker:Docker._create", "after"),
    ),
    "create.started": (Hook("sandbox.births:Births._journal", "before"),),
    "create.torn": (Hook("sandbox.journal:os.pwrite", "half"),),
    "create.leased": (Hook("sandbox.leases:LeaseFile.hold", "after"),),
    "create.answered": (
        Hook("sandbox.client:Fleet.create", "after", ("client",)),
        Hook("sandbox.server:Front._create", "after", ("front",)),
        Hook("sandbox.node_server:NodeServer.perform", "after", ("agent",), "create"),
        Hook("sandbox.session:Session._create", "after"),
    ),
    "exec.called": (
        Hook("sandbox.remote:RemoteBox.run", "before", ("client",)),
        Hook("sandbox.server:Front._forward", "before", ("front",), "run"),
        Hook("sandbox.node_server:NodeServer.perform", "before", ("agent",), "run"),
        Hook("sandbox.session:Session._run", "before"),
    ),
    "exec.intended": (Hook("sandbox.journal:Journal.intend", "after"),),
    "exec.running": (Hook("sandbox.session:Session._ahead", "before"),),
    "exec.ended": (Hook("sandbox.journal:Journal.finish", "before"),),
    "exec.torn": (Hook("sandbox.journal:os.pwrite", "half"),),
    "exec.recorded": (Hook("sandbox.journal:Journal.finish", "after"),),
    "exec.answered": (
        Hook("sandbox.remote:RemoteBox.run", "after", ("client",)),
        Hook("sandbox.server:Front._forward", "after", ("front",), "run"),
        Hook("sandbox.node_server:NodeServer.perform", "after", ("agent",), "run"),
    ),
    "upload.between": (Hook("sandbox.journal:Journal.intend", "after"),),
    "pause.stopped": (
        Hook("sandbox.backends.cgroups:Cgroup.freeze", "after"),
        Hook("docker.models.containers:Container.pause", "after"),
    ),
    "snapshot.saved": (Hook("sandbox.snapshots:save", "after"),),
    "fork.loaded": (Hook("sandbox.background:Background.skip", "before"),),
    "delete.called": (Hook("sandbox.node:Node.close_box", "before"),),
    "delete.ended": (Hook("sandbox.journals:Journals.remove", "before"),),
    "attach.found": (Hook("sandbox.births:Births.attach", "after"),),
    "replay.ran": (Hook("sandbox.journal:Journal.renew", "before"),),
}
"""Where processes die, by name. Hooks in the node also kill the clients, fronts and agents waiting there."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What happens at which place: which process dies, and after how many passes."""

    place: str
    pid: int
    passes: int = 0

    def write(self, path: Path) -> None:
        """Arms the place; the file appears whole."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(path)


class Trigger:
    """What the wrapped functions ask whether to kill."""

    def __init__(self, path: Path):
        self._path, self._last, self._passed = path, "", 0

    def pulled(self, place: str) -> Arm | None:
        """Returns the arm if this pass of `place` is the one; removes it then."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        arm = Arm(**json.loads(text))
        if arm.place != place:
            return None
        self._passed = self._passed + 1 if text == self._last else 1
        self._last = text
        if self._passed <= arm.passes:
            return None
        self._last = ""
        self._path.unlink()
        return arm

    def reach(self, place: str) -> None:
        """Kills, if this is the place and the pass; returns when the other process is dead."""
        if (arm := self.pulled(place)) is not None:
            kill(arm.pid)


def kill(pid: int) -> None:
    """Kills a process and returns when it is dead."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _DEATH_S
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} does not die"
        time.sleep(0.001)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def install(path: Path, kind: str) -> None:
    """Wraps the functions of all places that a process of `kind` has."""
    trigger = Trigger(path)
    for place, hooks in PLACES.items():
        for hook in hooks:
            if kind in hook.where:
                _wrap(hook, functools.partial(trigger.reach, place), functools.partial(trigger.pulled, place))


def _wrap(hook: Hook, reach: Callable[[], None], pulled: Callable[[], Arm | None]) -> None:
    module, _, name = hook.target.partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = name.split(".")
    for part in outer:
        holder = getattr(holder, part)
    inner = inspect.getattr_static(holder, name)
    if hook.when == "half":
        wrapped = _half(inner, pulled)
    elif inspect.iscoroutinefunction(inner):
        wrapped = _wrap_coroutine(inner, hook, reach)
    else:
        wrapped = _wrap_function(inner, hook, reach)
    setattr(holder, name, wrapped)


def _wrap_coroutine(inner: Callable[..., Any], hook: Hook, reach: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(inner)
    async def wrapped(*arguments: Any, **named: Any) -> Any:
        fits = _fits(hook, arguments)
        if fits and hook.when == "before":
            reach()
        result = await inner(*arguments, **named)
        if fits and hook.when == "after":
            reach()
        return result

    return wrapped


def _wrap_function(inner: Callable[..., Any], hook: Hook, reach: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        fits = _fits(hook, arguments)
        if fits and hook.when == "before":
            reach()
        result = inner(*arguments, **named)
        if fits and hook.when == "after":
            reach()
        return result

    return wrapped


def _half(inner: Callable[..., int], pulled: Callable[[], Arm | None]) -> Callable[..., int]:
    @functools.wraps(inner)
    def wrapped(fd: int, data: bytes, offset: int) -> int:
        if (arm := pulled()) is not None:
            inner(fd, data[: len(data) // 2], offset)
            kill(arm.pid)
        return inner(fd, data, offset)

    return wrapped


def _fits(hook: Hook, arguments: tuple[Any, ...]) -> bool:
    headers = [value for value in arguments if isinstance(value, dict) and "op" in value]
    return not hook.op or any(header["op"] == hook.op for header in headers)


def main() -> None:
    """Runs a node, a front or a node agent with its places."""
    arm, kind, *rest = sys.argv[1:]
    install(Path(arm), kind)
    if kind == "node":
        from sandbox.node import main as run

        sys.argv = ["sandbox.node", *rest]
        run()
    else:
        from rl.launch.cli import main as temper

        raise SystemExit(temper(["sandbox", *rest]))


if __name__ == "__main__":
    main()
