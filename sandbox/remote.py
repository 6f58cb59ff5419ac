"""A sandbox as its user sees it: each method is one command of the node's protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

from sandbox.channel import MAX_BODY, Header
from sandbox.connection import Connection
from sandbox.errors import FileError, LostError, PolicyError, UnknownOutcomeError
from sandbox.past import Past
from sandbox.types import ExecResult

MAX_OUTPUT = 16 << 20
_FILE_TIMEOUT_S = 60.0


class RemoteBox:
    """A sandbox on a node; fulfils `sandbox.base.Sandbox`."""

    def __init__(self, connection: Connection, box_id: str, past: Past | None = None):
        self._connection, self.id = connection, box_id
        self._past = past or Past()
        self.generation, self.replayed = self._past.generation, self._past.commands

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
        """Runs a shell line (str) or an argv; see `sandbox.base.Sandbox`."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise PolicyError("a command has at least one word")
        header: Header = {"op": "exec", "argv": argv, "env": dict(env or {}), "cwd": cwd}
        return await self._run(header, stdin, timeout_s, output_limit, idempotent)

    async def python(
        self, source: str, *, stdin: bytes = b"", timeout_s: float = 10.0, output_limit: int = 1 << 16
    ) -> ExecResult:
        """Runs Python source in a fresh fork of the resident interpreter; see `sandbox.base.Sandbox`."""
        code = source.encode(errors="surrogatepass")
        header: Header = {"op": "python", "source_bytes": len(code), "cwd": "/workspace"}
        return await self._run(header, code + stdin, timeout_s, output_limit)

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """Reads a file of at most `limit` bytes."""
        _check("limit", limit, MAX_OUTPUT)
        return (
            await self._file({"op": "read", "path": path, "max_bytes": limit}, b"", max(limit, 1024))
        ).stdout

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file, making its parent folders."""
        if len(data) > MAX_BODY:
            raise PolicyError(f"a file is written in one piece of at most {MAX_BODY} bytes, not {len(data)}")
        await self._file({"op": "write", "path": path, "mode": mode}, data, 1024)

    async def close(self) -> None:
        """Deletes the sandbox, everything in it, and its journal."""
        with contextlib.suppress(LostError):
            await self._connection.request({"op": "close", "box": self.id})

    async def _file(self, header: Header, body: bytes, limit: int) -> ExecResult:
        # Reading and writing one file are idempotent by nature; twice the limit, as an output keeps halves.
        result = await self._run(header, body, _FILE_TIMEOUT_S, 2 * limit, idempotent=True)
        if result.exit_code != 0 or result.truncated:
            why = result.stderr.decode(errors="replace").strip() or f"exit code {result.exit_code}"
            raise FileError(f"{header['op']} of {header['path']!r} in the sandbox failed: {why}")
        return result

    async def _run(
        self, header: Header, body: bytes, timeout_s: float, limit: int, idempotent: bool = False
    ) -> ExecResult:
        _check("output_limit", limit, 2 * MAX_OUTPUT)
        _check("timeout_s", timeout_s, 7 * 86400)
        command: Header = {**header, "timeout_s": timeout_s, "limit": limit}
        claim = self._past.claim(idempotent)
        while True:
            request = {"op": "run", "box": self.id, "command": command, "claim": asdict(claim)}
            try:
                reply, output = await self._connection.request(request, body)
                break
            except UnknownOutcomeError as error:
                claim = replace(claim, unknown=await self._past.decide(claim, error))
        cut = reply["stdout_bytes"]
        names = ("exit_code", "truncated", "timed_out", "oom", "duration_s")
        fields: dict[str, Any] = {name: reply[name] for name in names}
        return ExecResult(stdout=output[:cut], stderr=output[cut:], **fields)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _check(name: str, value: float, most: float) -> None:
    if not 0 < value <= most:
        raise PolicyError(f"{name} must be above 0 and at most {most}, not {value}")
