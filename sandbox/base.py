"""The contract of a sandbox: an async protocol that every backend fulfils.

What a backend lacks is told by `Fleet.capabilities`, and asking for it is a `PolicyError`, never a downgrade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from sandbox.policy import Denial
from sandbox.process import Process
from sandbox.shell import Shell
from sandbox.stream import Stream
from sandbox.types import Ear, ExecResult, FileInfo


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
        user: int | None = None,
        output_limit: int = 1 << 20,
        idempotent: bool = False,
    ) -> ExecResult:
        """Runs a shell line (str) or an argv.

        Returns when the main process ends; what it left in the background stays, without its output being
        read any further. A timeout or a cancelled caller kills the whole process tree. Of an output beyond
        `output_limit` bytes a stream, head and tail are kept. `user` is a number from 1000 to 59999; commands
        are never root. `idempotent` says that a caller who does not know its outcome may run it again.
        """
        ...

    def stream(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        user: int | None = None,
        output_limit: int = 1 << 20,
        idempotent: bool = False,
    ) -> Stream:
        """Runs a command and gives its output while it comes: `async with ... as s: async for piece in s`."""
        ...

    async def python(
        self, source: str, *, stdin: bytes = b"", timeout_s: float = 10.0, output_limit: int = 1 << 16
    ) -> ExecResult:
        """Runs Python source in a fresh fork of the resident interpreter: milliseconds, no state kept.

        Where the sandbox has users of its own, the call has one to itself, and its processes and files are
        gone when it returns.
        """
        ...

    def shell(
        self, *, cwd: str = "/workspace", env: Mapping[str, str] | None = None, program: str = "bash"
    ) -> Shell:
        """Returns a session, in which folder, variables and functions stay from command to command."""
        ...

    async def start(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        user: int | None = None,
        log_limit: int = 1 << 16,
        terminal: tuple[int, int] | None = None,
    ) -> Process:
        """Starts a background process (logs, input, signals), if asked for on a terminal (rows, columns)."""
        ...

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """Reads a file of at most `limit` bytes."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file, making its parent folders."""
        ...

    async def list_files(self, path: str = "/workspace", *, limit: int = 10_000) -> list[FileInfo]:
        """Returns what is in a folder, by name."""
        ...

    async def stat(self, path: str) -> FileInfo:
        """Returns what is known of a path, following no link at its end."""
        ...

    async def remove(self, path: str) -> None:
        """Removes a file or a whole folder."""
        ...

    async def upload(self, source: Path, to: str) -> None:
        """Copies a local file or folder to the path `to`."""
        ...

    async def upload_archive(self, archive: Path | bytes, to: str) -> None:
        """Unpacks a tar or zip archive, which may be hostile, into the folder `to`."""
        ...

    async def download(self, path: str, to: Path) -> None:
        """Copies a file or folder to the local path `to`, which must not exist; all or nothing."""
        ...

    async def pause(self) -> None:
        """Stops all processes and deadlines until `resume`."""
        ...

    async def resume(self) -> None:
        """Lets a paused sandbox go on."""
        ...

    async def halt(self) -> None:
        """Ends all processes that commands started; files stay."""
        ...

    async def extend(self, ttl_s: float) -> None:
        """Sets how many seconds the sandbox may be idle from now on."""
        ...

    async def phase(self, name: str) -> None:
        """Goes on to another phase of the sandbox's network; what it does not allow is cut at once."""
        ...

    async def denials(self) -> list[Denial]:
        """Returns what did not pass the sandbox's network."""
        ...

    def hear(self) -> AbstractContextManager[Ear]:
        """Listens to what the sandbox asks of `sandbox.policy.OWNER_HOST`, until it is left."""
        ...

    async def snapshot(self) -> str:
        """Keeps the files of the sandbox; returns the name from which `Fleet.create` starts others."""
        ...

    async def close(self) -> None:
        """Deletes the sandbox, everything in it and its journal."""
        ...
