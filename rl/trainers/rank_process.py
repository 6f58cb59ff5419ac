"""A learner spread over several processes: rank 0 here, the others as children that follow it.

Every call runs on all ranks with the same arguments, and rank 0's result is the answer. A rank that fails
ends, which the others notice in their next exchange; then all of them end and the reason is told.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl.launch.config import RunConfig
from rl.publish import outbox
from rl.trainers.ranks import Ranks

_PR_SET_PDEATHSIG = 1
_END_S = 5.0


class RankError(RuntimeError):
    """A process of the learner failed: which, and with what."""


class LearnerGroup:
    """A learner in several processes; it has the methods of `Learner`."""

    def __init__(self, config: RunConfig, checkpoints: Path) -> None:
        size = config.trainer.parallel.data
        self._folder = tempfile.TemporaryDirectory(prefix="tempering-ranks-")
        store = str(Path(self._folder.name) / "store")
        self._children = [_Child(rank, store, config, checkpoints) for rank in range(1, size)]
        try:
            self.outbox = outbox(config.launcher.weights, lambda: self.call("weights"))
            self._learner = _join(0, store, config, checkpoints)
            self._collect()
        except Exception as error:
            self.close()
            raise RankError(self._reason("start", error)) from error

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any) -> Any:
            return self.call(name, *args)

        return method

    def call(self, name: str, *args: Any) -> Any:
        """Runs a method on all ranks.

        Raises:
            RankError: A rank failed; all of them have ended.
        """
        try:
            for child in self._children:
                child.pipe.send((name, args))
            result = getattr(self._learner, name)(*args)
            self._collect()
        except Exception as error:
            reason = self._reason(name, error)
            self.close()
            raise RankError(reason) from error
        return result

    def _collect(self) -> None:
        for child in self._children:
            if (answer := child.pipe.recv()) is not None:
                child.failure = answer
                raise RankError(answer)

    def _reason(self, name: str, error: Exception) -> str:
        for child in self._children:
            with suppress(EOFError, OSError):
                if not child.failure and child.pipe.poll(_END_S):
                    child.failure = child.pipe.recv() or ""
        told = "; ".join(f"rank {c.rank}: {c.failure}" for c in self._children if c.failure)
        return (
            f"the learner's {name} failed on {1 + len(self._children)} processes ({told or error}); resume "
            "the run from its last checkpoint"
        )

    def close(self) -> None:
        """Ends all ranks."""
        for child in self._children:
            child.end()
        self._children = []
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()


class _Child:
    def __init__(self, rank: int, store: str, config: RunConfig, checkpoints: Path) -> None:
        self.rank, self.failure = rank, ""
        self.pipe, theirs = Pipe()
        roots = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rl.trainers.rank_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": roots, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.pipe.send((rank, store, config, checkpoints))

    def end(self) -> None:
        """Closes the pipe, on which an idle rank ends; one that is stuck in an exchange is killed."""
        self.pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _join(rank: int, store: str, config: RunConfig, checkpoints: Path) -> Any:
    """Meets the other ranks and returns this one's learner."""
    from rl.trainers.learner import Learner

    size = config.trainer.parallel.data
    meeting = dist.FileStore(store, size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size)
    return Learner(config, checkpoints, Ranks(rank, size))


def follow(pipe: Connection) -> None:
    """What a child does: the calls of rank 0, until the pipe is closed or one fails."""
    try:
        learner = _join(*pipe.recv())
        pipe.send(None)
        while True:
            try:
                name, args = pipe.recv()
            except EOFError:
                return
            getattr(learner, name)(*args)
            pipe.send(None)
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver says when to stop
    follow(Connection(int(sys.argv[1])))
