"""A sandbox as its user sees it: each method is one command of the node's protocol."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox.archives import read_archive
from sandbox.calls import Call
from sandbox.calls import run as run_call
from sandbox.channel import MAX_BODY, Header
from sandbox.connection import Connection, Link
from sandbox.errors import DiskFullError, FileError, LostError, PolicyError, UnknownOutcomeError
from sandbox.making import make
from sandbox.outcome import Outcome
from sandbox.owners import hearing
from sandbox.past import Past
from sandbox.policy import Denial
from sandbox.process import Process
from sandbox.recovery import Claim
from sandbox.shell import Shell
from sandbox.stream import Stream
from sandbox.trees import Item, TreeLimits, TreeWriter, batches, read_tree
from sandbox.types import Ear, ExecResult, FileInfo, Output

MAX_OUTPUT = 16 << 20
_FILE_TIMEOUT_S, _TREE_TIMEOUT_S = 60.0, 600.0
_TREE = TreeLimits()
Sink = Callable[[int, bytes], None]


class RemoteBox:
    """A sandbox on a node; fulfils `sandbox.base.Sandbox`.

    `ttl_s` is how long it may be idle and `lease_s` how long it outlives its owner's last client, as the node
    said with its last reply (0: nothing yet).
    """

    def __init__(self, connection: Link, box_id: str, past: Past | None = None):
        self._connection, self.id = connection, box_id
        self._past = past or Past()
        self.generation, self.replayed = self._past.generation, self._past.commands
        self.ttl_s, self.lease_s = self._past.ttl_s, self._past.lease_s

    @property
    def position(self) -> int:
        """How many commands this caller has given: its place in the sandbox's journal."""
        return self._past.given

    @property
    def recorded(self) -> int:
        """How many commands the journal held when this caller came; as many are answered from it."""
        return self._past.recorded

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
        """Runs a shell line (str) or an argv; see `sandbox.base.Sandbox`."""
        header = _command("exec", command, env, cwd, user)
        return (await self.run(header, stdin, timeout_s, output_limit, idempotent)).result

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
        """Runs a command as `exec` does and gives its output while it comes; see `sandbox.base.Sandbox`."""
        header = {**_command("exec", command, env, cwd, user), "stream": True}

        async def run(take: Callable[[Output], None]) -> ExecResult:
            seen = [False]

            def sink(which: int, data: bytes) -> None:
                seen[0] = True
                take(Output(data, bool(which)))

            result = (await self.run(header, stdin, timeout_s, output_limit, idempotent, sink)).result
            for data, stderr in ((result.stdout, False), (result.stderr, True)):
                if data and not seen[0]:  # a recorded result, whose pieces nobody kept
                    take(Output(data, stderr))
            return result

        return Stream(run)

    async def python(
        self, source: str, *, stdin: bytes = b"", timeout_s: float = 10.0, output_limit: int = 1 << 16
    ) -> ExecResult:
        """Runs Python source in a fresh fork of the resident interpreter; see `sandbox.base.Sandbox`."""
        code = source.encode(errors="surrogatepass")
        header: Header = {"op": "python", "source_bytes": len(code), "cwd": "/workspace"}
        return (await self.run(header, code + stdin, timeout_s, output_limit)).result

    async def call(self, call: Call) -> ExecResult:
        """Runs a call that brings all it needs, in a sandbox without state (backend `function`).

        Raises:
            PolicyError: The sandbox keeps a state, and the call brings files.
        """
        return await run_call(self, call)

    def shell(
        self, *, cwd: str = "/workspace", env: Mapping[str, str] | None = None, program: str = "bash"
    ) -> Shell:
        """Returns a session that keeps folder, variables and functions from command to command."""
        return Shell(self, cwd, dict(env or {}), program)

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
        """Starts a background process; with `terminal` (rows, columns) on one of its own.

        Its last `log_limit` bytes of output are kept. A sandbox has at most 32 of them at once, and no more
        than a quarter of the processes it may have.
        """
        _check("log_limit", log_limit, 1 << 20)
        header = {**_command("start", command, env, cwd, user), "pty": terminal}
        outcome = await self.run(header, b"", _FILE_TIMEOUT_S, log_limit)
        return Process(self, json.loads(outcome.extra)["process"])

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """Reads a file of at most `limit` bytes."""
        _check("limit", limit, MAX_OUTPUT)
        header: Header = {"op": "read", "path": path, "max_bytes": limit}
        return (await self._file(header, b"", max(limit, 1024))).stdout

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file, making its parent folders."""
        if len(data) > MAX_BODY:
            raise PolicyError(f"a file is written in one piece of at most {MAX_BODY} bytes, not {len(data)}")
        await self._file({"op": "write", "path": path, "mode": mode}, data, 1024)

    async def list_files(self, path: str = "/workspace", *, limit: int = 10_000) -> list[FileInfo]:
        """Returns what is in a folder, by name; more than `limit` entries are an error."""
        _check("limit", limit, 100_000)
        header: Header = {"op": "list", "path": path, "max_entries": limit}
        return _infos((await self._file(header, b"", 8 << 20)).stdout)

    async def stat(self, path: str) -> FileInfo:
        """Returns what is known of a path, following no link at its end."""
        return _infos((await self._file({"op": "stat", "path": path}, b"", 1 << 16)).stdout)[0]

    async def remove(self, path: str) -> None:
        """Removes a file or a whole folder."""
        await self._file({"op": "remove", "path": path}, b"", 1024)

    async def move(self, path: str, to: str) -> None:
        """Gives a file or folder another path, making the folders that it is in; a file there is replaced."""
        await self._file({"op": "move", "path": path, "to": to}, b"", 1024)

    async def read_at(self, path: str, at: int, size: int) -> bytes:
        """Reads up to `size` bytes of a file from `at` on; none are left when it is fewer."""
        _check("size", size, MAX_OUTPUT)
        header: Header = {"op": "read", "path": path, "max_bytes": size, "at": at}
        return (await self._file(header, b"", max(size, 1024))).stdout

    async def write_at(self, path: str, at: int, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a piece of a file; one at 0 makes the file anew."""
        await self._file({"op": "write", "path": path, "mode": mode, "at": at}, data, 1024)

    async def upload(self, source: Path, to: str, *, limits: TreeLimits = _TREE) -> None:
        """Copies a local file or folder to the path `to`; links must stay inside it.

        Raises:
            UnsafeTreeError: It has what does not go into a sandbox, or too much.
            DiskFullError: It does not fit.
        """
        await self._unpack(read_tree(source, limits), to)

    async def upload_archive(self, archive: Path | bytes, to: str, *, limits: TreeLimits = _TREE) -> None:
        """Unpacks a tar or zip archive, whoever made it, into the folder `to`.

        Every entry is checked before the first reaches the sandbox.

        Raises:
            UnsafeTreeError: It leads out of `to`, is a bomb, or has what is neither file, folder nor link.
            DiskFullError: It does not fit.
        """
        for _ in read_archive(archive, limits):
            pass
        await self._unpack(read_archive(archive, limits), to)

    async def download(self, path: str, to: Path, *, limits: TreeLimits = _TREE) -> None:
        """Copies a file or folder to the local path `to`, which must not exist; all or nothing.

        It is what is there now, also for a caller that replays; what goes away meanwhile is left out.

        Raises:
            UnsafeTreeError: It leads out of itself, or is too much.
            FileError: It is not there, or cannot be read.
        """
        writer = TreeWriter(to, limits)
        header: Header = {
            "op": "pack", "roots": [path], "base": path, "max_entries": limits.entries,
            "max_bytes": limits.size, "stream": True, "raw": True, "path": path,
        }  # fmt: skip
        room = limits.size + limits.entries * 1024
        try:
            await self._file(header, b"", room, lambda which, data: None if which else writer.feed(data))
            writer.finish()
        finally:
            writer.discard()

    async def pause(self) -> None:
        """Stops all processes, deadlines included, until `resume`; commands are refused meanwhile.

        Raises:
            PolicyError: The backend cannot (capability `pause`).
        """
        await self._ask({"op": "pause", "box": self.id})

    async def resume(self) -> None:
        """Lets a paused sandbox go on."""
        await self._ask({"op": "resume", "box": self.id})

    async def halt(self) -> None:
        """Ends all processes that commands started, also those that left their session; the sandbox stays.

        Raises:
            ProtocolError: Some do not end; the sandbox was ended.
        """
        await self.run({"op": "halt"}, b"", _FILE_TIMEOUT_S, 1024, True)

    async def extend(self, ttl_s: float) -> None:
        """Sets how many seconds the sandbox may be idle from now on before it is ended."""
        _check("ttl_s", ttl_s, 30 * 86400)
        await self._ask({"op": "extend", "box": self.id, "ttl_s": ttl_s})

    async def phase(self, name: str) -> None:
        """Goes on to another phase of its network; connections that this does not allow are cut.

        It is a command of the sequence: a caller who starts over gives it again in its place.

        Raises:
            PolicyError: The sandbox has no network, or no phase of that name.
        """
        await self.run({"op": "phase", "phase": name}, b"", _FILE_TIMEOUT_S, 1024, True)

    async def denials(self) -> list[Denial]:
        """Returns what did not pass the sandbox's network, the latest last; alike ones are counted.

        Raises:
            PolicyError: The sandbox has no network.
        """
        reply, _ = await self._connection.request({"op": "denials", "box": self.id})
        return [Denial.of(denial) for denial in reply["denials"]]

    def hear(self) -> AbstractContextManager[Ear]:
        """Listens to what this sandbox asks of `sandbox.policy.OWNER_HOST`, until it is left.

        It reaches that in phases with a rule for it, and nobody else does.

        Raises:
            PolicyError: Its node is not of this machine.
        """
        if not isinstance(self._connection, Connection) or self._connection.state_dir is None:
            raise PolicyError(
                "a sandbox asks its owner through a socket of its own machine, and this one is reached "
                "through a front: use the node of this machine (url local)"
            )
        return hearing(self._connection.state_dir, self.id)

    async def snapshot(self) -> str:
        """Keeps the files of the sandbox; returns the name from which `Fleet.create` starts others.

        Raises:
            RefusedError: A command is running (`busy`).
            FileError: There are files that cannot be read.
        """
        return (await self._connection.request({"op": "snapshot", "box": self.id}))[0]["snapshot"]

    async def fork(self, count: int = 1) -> list[RemoteBox]:
        """Starts `count` sandboxes with this one's files and journal, all or none; processes stay behind.

        Raises:
            RefusedError: They do not fit, or a command is running (`busy`).
            FileError: There are files that cannot be read.
        """
        _check("count", count, 256)
        reply = await make(self._connection, {"op": "fork", "box": self.id, "count": count})
        about = reply.get("about") or [{"box": name} for name in reply["boxes"]]
        return [RemoteBox(self._connection, one["box"], Past.known(one)) for one in about]

    async def close(self) -> None:
        """Deletes the sandbox, everything in it, and its journal."""
        with contextlib.suppress(LostError):
            await self._connection.request({"op": "close", "box": self.id})

    async def _unpack(self, items: Iterable[Item], to: str) -> None:
        for batch in batches(items):
            await self._file({"op": "unpack", "path": to}, batch, 4096, timeout_s=_TREE_TIMEOUT_S)

    async def _file(
        self,
        header: Header,
        body: bytes,
        limit: int,
        sink: Sink | None = None,
        timeout_s: float = _FILE_TIMEOUT_S,
    ) -> ExecResult:
        # File operations are idempotent by nature; twice the limit, as an output keeps halves.
        result = (await self.run(header, body, timeout_s, 2 * limit, True, sink)).result
        if result.exit_code != 0 or result.truncated:
            why = result.stderr.decode(errors="replace").strip() or f"exit code {result.exit_code}"
            kind = DiskFullError if result.disk_full else FileError
            raise kind(f"{header['op']} of {header['path']!r} in the sandbox failed: {why}")
        return result

    async def run(
        self,
        header: Header,
        body: bytes,
        timeout_s: float,
        limit: int,
        idempotent: bool = False,
        sink: Sink | None = None,
    ) -> Outcome:
        """Sends one command, at its place in the sequence, and returns what came of it.

        Raises:
            UnknownOutcomeError: It was under way at a crash, and is not to run again.
        """
        _check("output_limit", limit, 2 * MAX_OUTPUT if sink is None else 1 << 32)
        _check("timeout_s", timeout_s, 7 * 86400)
        command: Header = {**header, "timeout_s": timeout_s, "limit": limit}
        claim = self._past.claim(idempotent) if header["op"] != "pack" else None
        while True:
            request: Header = {"op": "run", "box": self.id, "command": command}
            if claim is not None and claim != Claim():
                request["claim"] = asdict(claim)
            try:
                return Outcome.of(*await self._ask(request, body, sink))
            except UnknownOutcomeError as error:
                if claim is None:
                    raise
                claim = replace(claim, unknown=await self._past.decide(claim, error))

    async def _ask(
        self, request: Header, body: bytes = b"", sink: Sink | None = None
    ) -> tuple[Header, bytes]:
        reply, data = await self._connection.request(request, body, sink)
        self.ttl_s, self.lease_s = reply.get("ttl_s", self.ttl_s), reply.get("lease_s", self.lease_s)
        return reply, data

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _command(
    op: str, command: str | Sequence[str], env: Mapping[str, str] | None, cwd: str, user: int | None
) -> Header:
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv:
        raise PolicyError("a command has at least one word")
    header: Header = {"op": op, "argv": argv, "env": dict(env or {}), "cwd": cwd}
    return header if user is None else {**header, "user": user}


def _infos(lines: bytes) -> list[FileInfo]:
    try:
        found = [FileInfo(**json.loads(line)) for line in lines.splitlines()]
    except (ValueError, TypeError, RecursionError) as error:
        raise FileError("the sandbox described its files out of shape") from error
    for info in found:
        texts, numbers = (info.path, info.kind, info.target), (info.size, info.mode, info.mtime, info.uid)
        if {type(text) for text in texts} != {str} or {type(number) for number in numbers} != {int}:
            raise FileError("the sandbox described its files by what is neither text nor number")
    return found


def _check(name: str, value: float, most: float) -> None:
    if not 0 < value <= most:
        raise PolicyError(f"{name} must be above 0 and at most {most}, not {value}")
