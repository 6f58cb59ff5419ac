"""Runs a driver whose processes can die at a named place in their code, and count what they sample.

    KILLS=FOLDER python -m benchmarks.kills_places train ...

The functions of `PLACES` are wrapped in the driver and in the processes that it opens. Nothing happens until
the file `arm` in FOLDER names one of them: the next pass removes the file and kills its process with SIGKILL,
or only says `reached` and goes on, when somebody else is to die there. The file `tokens-<pid>` of the process
that holds the token log has how many tokens were appended, how many of them were written out, and the most
that ever waited; it is memory that the kernel keeps when the process is killed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import mmap
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

FOLDER = "KILLS"
ARM, REACHED = "arm", "reached"
PLACES = {
    "checkpoint.begun": ("rl.checkpoint:CheckpointStore._clear", "after"),
    "checkpoint.written": ("rl.checkpoint:_seal", "before"),
    "checkpoint.sealed": ("rl.checkpoint:_seal", "after"),
    "checkpoint.moved": ("rl.checkpoint:CheckpointStore._move", "after"),
    "checkpoint.forgetting": ("rl.rollout.wal:TokenLog.consumed", "before"),
    "weights.packed": ("rl.weights:WeightSnapshot.pack", "after"),
    "weights.loading": ("rl.engines.native:NativeEngine.load_weights", "before"),
    "weights.loaded": ("rl.engines.native:NativeEngine.load_weights", "after"),
    "tool.called": ("rl.rollout.tools:Tools.call", "before"),
    "tool.running": ("sandbox.remote:RemoteBox.python", "before"),
    "tool.ended": ("rl.rollout.tools:Tools.call", "after"),
    "sample.ended": ("rl.rollout.wal:TokenLog.end", "before"),
}
"""Function and side of it, by the name of the place."""

_COUNTS = struct.Struct("<QQQ")


def arm(folder: Path, place: str, *, die: bool) -> None:
    """Has the next process that comes by `place` die there, or say that it was there."""
    assert place in PLACES, place
    draft = folder / f".{ARM}"
    draft.write_text(f"{place} {'die' if die else 'tell'}")
    draft.replace(folder / ARM)


def tokens(folder: Path, pid: int) -> tuple[int, int, int]:
    """Returns how many tokens a process appended, wrote out, and had waiting at the most."""
    file = folder / f"tokens-{pid}"
    return _COUNTS.unpack(file.read_bytes()[: _COUNTS.size]) if file.exists() else (0, 0, 0)


def _pass(place: str) -> None:
    folder = Path(os.environ[FOLDER])
    try:
        wanted, _, what = (folder / ARM).read_text().partition(" ")
        if wanted != place:
            return
        (folder / ARM).unlink()
    except FileNotFoundError:
        return
    (folder / REACHED).write_text(str(os.getpid()))
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    """Wraps the places of this process."""
    for place, (target, when) in PLACES.items():
        module, _, name = target.partition(":")
        holder: Any = importlib.import_module(module)
        *outer, name = name.split(".")
        for part in outer:
            holder = getattr(holder, part)
        inner = inspect.getattr_static(holder, name)
        bind = classmethod if isinstance(inner, classmethod) else lambda function: function
        function = inner.__func__ if isinstance(inner, classmethod) else inner
        setattr(holder, name, bind(_wrapped(function, when, functools.partial(_pass, place))))


def _wrapped(inner: Callable[..., Any], when: str, reach: Callable[[], None]) -> Callable[..., Any]:
    before, after = (reach, _nothing) if when == "before" else (_nothing, reach)

    @functools.wraps(inner)
    def plain(*arguments: Any, **named: Any) -> Any:
        before()
        result = inner(*arguments, **named)
        after()
        return result

    @functools.wraps(inner)
    async def waiting(*arguments: Any, **named: Any) -> Any:
        before()
        result = await inner(*arguments, **named)
        after()
        return result

    return waiting if inspect.iscoroutinefunction(inner) else plain


def _nothing() -> None:
    pass


def count_tokens() -> None:
    """Counts what this process's token log is given, and what of it is written out."""
    from rl.rollout.wal import TokenLog

    file = Path(os.environ[FOLDER]) / f"tokens-{os.getpid()}"
    file.write_bytes(bytes(_COUNTS.size))
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), _COUNTS.size)
    flush = TokenLog.flush
    on_step = TokenLog.on_step
    state = {"appended": 0, "written": 0, "most": 0}

    def keep() -> None:
        _COUNTS.pack_into(memory, 0, state["appended"], state["written"], state["most"])

    @functools.wraps(on_step)
    def stepped(self: TokenLog, frame: Any) -> None:
        on_step(self, frame)
        state["appended"] = self._counts["tokens"]
        keep()

    @functools.wraps(flush)
    def flushed(self: TokenLog, **named: Any) -> None:
        reached = self._counts["tokens"]
        flush(self, **named)
        state["most"] = max(state["most"], self._counts["tokens"] - state["written"])
        state["written"] = max(state["written"], reached)
        keep()

    TokenLog.on_step, TokenLog.flush = stepped, flushed  # type: ignore[method-assign]


@asynccontextmanager
async def open_generator(*arguments: Any) -> AsyncIterator[Any]:
    """Opens a generator in a process that has the places and counts its tokens."""
    from rl import build

    install()
    count_tokens()
    async with build.open_generator(*arguments) as generator:
        yield generator


@asynccontextmanager
async def open_learner(*arguments: Any) -> AsyncIterator[Any]:
    """Opens a learner in a process that has the places."""
    from rl.trainers import learner

    install()
    async with learner.open_learner(*arguments) as opened:
        yield opened


def main() -> int:
    """Runs the command line with the places in all its processes."""
    import benchmarks.kills_places as places
    from rl import actors
    from rl.launch.cli import main as temper

    install()
    start = actors.Cluster.open
    armed = {"open_generator": places.open_generator, "open_learner": places.open_learner}

    @functools.wraps(start)
    async def opened(self: actors.Cluster, *arguments: Any) -> Any:
        return await start(self, *(armed.get(getattr(one, "__name__", ""), one) for one in arguments))

    actors.Cluster.open = opened  # type: ignore[method-assign]
    return temper(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
