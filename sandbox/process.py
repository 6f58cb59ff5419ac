"""A background process in a sandbox, as its user sees it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandbox.errors import InfrastructureError
from sandbox.types import ExecResult

if TYPE_CHECKING:
    from sandbox.outcome import Outcome
    from sandbox.remote import RemoteBox

_ASK_S, _LOOK_S = 60.0, 30.0
_LIMIT = 1 << 18


@dataclass(frozen=True, slots=True)
class Log:
    """Output from `offset` on, stdout and stderr as they came; what was before it may have been dropped."""

    data: bytes
    offset: int
    running: bool
    exit_code: int | None
    signal: int | None

    @property
    def end(self) -> int:
        """From where to ask on."""
        return self.offset + len(self.data)


class Process:
    """Made by `RemoteBox.start`. `number` is its place among the sandbox's processes, in every generation."""

    def __init__(self, box: RemoteBox, number: int):
        self._box, self.number = box, number

    async def logs(self, offset: int = 0, *, wait_s: float = 0.0, limit: int = _LIMIT) -> Log:
        """Returns output from `offset` on; waits up to `wait_s` seconds for some, or for the end.

        Raises:
            InfrastructureError: The process could not be started.
            PolicyError: It has been forgotten for newer ones.
        """
        outcome = await self._do("poll", limit=limit, offset=offset, wait_s=wait_s)
        said: dict[str, Any] = json.loads(outcome.extra)
        if said.pop("failure") and said["exit_code"] is None:
            raise InfrastructureError("the sandbox could not start the process")
        if said["running"]:
            said["exit_code"] = said["signal"] = None
        return Log(outcome.result.stdout, **said)

    async def follow(self, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields output from `offset` on until the process has ended."""
        while True:
            log = await self.logs(offset, wait_s=_LOOK_S)
            if log.data:
                yield log.data
            if not log.running:
                return
            offset = log.end

    async def wait(self, timeout_s: float = 60.0) -> ExecResult:
        """Returns how it ended, with the output that was kept; `timed_out` when it still runs.

        A process is never killed by waiting for it.
        """
        start = time.monotonic()
        offset, kept, dropped = 0, bytearray(), False
        while True:
            left = max(timeout_s - (time.monotonic() - start), 0.0)
            log = await self.logs(offset, wait_s=min(left, _LOOK_S))
            dropped = dropped or log.offset > offset
            kept += log.data
            offset = log.end
            if not log.running or (not left and not log.data):
                return ExecResult(
                    exit_code=None if log.running else log.exit_code,
                    stdout=bytes(kept),
                    stderr=b"",
                    truncated=dropped,
                    timed_out=log.running,
                    duration_s=time.monotonic() - start,
                    signal=None if log.running else log.signal,
                )

    async def write(self, data: bytes, *, eof: bool = False) -> None:
        """Writes to its input, of which at most 1 MiB waits; `eof` closes it (on a terminal, write b"\\x04").

        Raises:
            RefusedError: It does not read (`busy`).
        """
        await self._do("input", data, eof=eof)

    async def signal(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal to the process and its group; one that has ended hears nothing."""
        await self._do("signal", number=int(number))

    async def resize(self, rows: int, columns: int) -> None:
        """Changes the size of its terminal."""
        await self._do("resize", rows=rows, columns=columns)

    async def _do(self, op: str, body: bytes = b"", *, limit: int = 1024, **fields: Any) -> Outcome:
        header = {"op": op, "process": self.number, **fields}
        return await self._box.run(header, body, _ASK_S, limit, op == "poll")
