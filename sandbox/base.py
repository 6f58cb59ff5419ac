"""The contract of a sandbox: a small async protocol that every backend fulfils."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sandbox.types import ExecResult


class Sandbox(Protocol):
    """One live sandbox. All methods raise errors of `sandbox.errors` when the sandbox itself is at fault."""

    id: str

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        output_limit: int = 1 << 20,
        idempotent: bool = False,
    ) -> ExecResult:
        """Runs a shell line (str) or an argv.

        Returns when the main process ends; what it left in the background stays, without its output being
        read any further. A timeout or a cancelled caller kills the whole process tree. `idempotent` says
        that a caller who does not know its outcome may run it again.
        """
        ...

    async def python(
        self, source: str, *, stdin: bytes = b"", timeout_s: float = 10.0, output_limit: int = 1 << 16
    ) -> ExecResult:
        """Runs Python source in a fresh fork of the resident interpreter: milliseconds, no state kept.

        Where the sandbox has users of its own, the call has one to itself, and its processes and files are
        gone when it returns.
        """
        ...

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """Reads a file of at most `limit` bytes."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file, making its parent folders."""
        ...

    async def close(self) -> None:
        """Deletes the sandbox and everything in it."""
        ...
