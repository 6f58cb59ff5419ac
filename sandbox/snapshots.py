"""Disk snapshots: what a sandbox has written as a tree, kept by the node, from which others start.

That is all of `/workspace`, `/tmp` and `/dev/shm`, and in a root of layers whatever was changed or removed.

A snapshot holds files, not processes. It is taken while no command runs; what background processes write
meanwhile may be in it or not. What comes out of a sandbox is checked on its way into another, as any tree.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from sandbox.box import Box
from sandbox.errors import DiskFullError, FileError, LostError, UnsafeTreeError
from sandbox.journal_file import sync_folder
from sandbox.layers.upper import Upper
from sandbox.layers.writable import Writable
from sandbox.trees import Checker, Parser, TreeLimits, batches
from sandbox.types import Limits

FOLDER = "snapshots"
KEEP_S = 86400.0
_ROOTS = ("/workspace", "/tmp", "/dev/shm")
_LIMITS = TreeLimits(1 << 30, 200_000)
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of a snapshot: of which sandbox, and after which of its commands, it was taken."""

    id: str
    owner: str
    sandbox: str
    backend: str
    spec: dict[str, Any]
    seq: int
    base: str
    taken: float = field(default_factory=time.time)


class Snapshots:
    """The snapshots of a node: `<id>.json`, written last, `<id>.tree`, of a root of layers `<id>.gone`."""

    def __init__(self, state_dir: Path):
        self._folder = state_dir / FOLDER

    async def take(self, box: Box) -> Snapshot:
        """Takes a snapshot of a sandbox.

        Raises:
            RefusedError: A command is running.
            FileError: There are files that its user cannot read, or too many.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = f"snap-{secrets.token_hex(6)}"
        async with box.quiet() as seq:
            try:
                await save(box, self.tree(name))
            except BaseException:
                self._unlink(name)
                raise
            taken = Snapshot(name, box.owner, box.id, box.backend, asdict(box.spec), seq, box.snapshot)
        recording = asyncio.create_task(asyncio.to_thread(self._record, taken))
        try:
            await asyncio.shield(recording)
        except BaseException:
            await asyncio.gather(recording, return_exceptions=True)
            self._drop(name)
            raise
        return taken

    def _record(self, taken: Snapshot) -> None:
        """Writes the record of a snapshot, when its files are on disk; returns when that is, too."""
        tree, draft = self.tree(taken.id), self._folder / f"{taken.id}.draft"
        draft.write_text(json.dumps(asdict(taken)))
        for path in (tree, _gone(tree), draft):
            if path.exists():
                _sync(path)
        draft.replace(self._folder / f"{taken.id}.json")
        sync_folder(self._folder)

    @asynccontextmanager
    async def passing(self, box: Box) -> AsyncGenerator[tuple[str, asyncio.Task[int]]]:
        """Keeps the files of a sandbox for a while, as a snapshot that nobody else sees.

        Gives the name of its tree and the task that saves it, whose result is the number of the last command
        before it.

        Raises:
            RefusedError: A command is running.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = f"snap-{secrets.token_hex(6)}"

        async def saved() -> int:
            async with box.quiet() as seq:
                await save(box, self.tree(name))
            return seq

        saving = asyncio.create_task(saved())
        try:
            await asyncio.sleep(0)
            if saving.done():  # one that is busy is refused before anything starts
                await saving
            yield name, saving
        finally:
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)
            self._unlink(name)

    def tree(self, name: str) -> Path:
        """Returns where the files of a snapshot are."""
        return self._folder / f"{name}.tree"

    def get(self, name: str, owner: str) -> Snapshot:
        """Returns a snapshot of an owner.

        Raises:
            LostError: There is none.
        """
        for snapshot in self.of(owner):
            if snapshot.id == name:
                return snapshot
        raise LostError(f"{owner} has no snapshot {name}")

    def of(self, owner: str) -> list[Snapshot]:
        """Returns the snapshots of an owner, the oldest first."""
        found = [snapshot for snapshot in self._all() if snapshot.owner == owner]
        return sorted(found, key=lambda snapshot: snapshot.taken)

    def latest(self, box_id: str, owner: str) -> Snapshot | None:
        """Returns the snapshot after the most commands of a sandbox."""
        mine = [snapshot for snapshot in self.of(owner) if snapshot.sandbox == box_id]
        return max(mine, key=lambda snapshot: snapshot.seq, default=None)

    def remove(self, name: str, owner: str) -> None:
        """Deletes a snapshot; one that is gone already is fine."""
        with suppress(LostError):
            self.get(name, owner)
            self._drop(name)

    def _drop(self, name: str) -> None:
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        self._unlink(name)

    def _unlink(self, name: str) -> None:
        self.tree(name).unlink(missing_ok=True)
        _gone(self.tree(name)).unlink(missing_ok=True)

    def sweep(self, keep_s: float = KEEP_S) -> None:
        """Removes what is older, and what has no whole record: nobody can be taking a snapshot yet."""
        for snapshot in self._all():
            if time.time() - snapshot.taken > keep_s:
                self.remove(snapshot.id, snapshot.owner)
        known = {snapshot.id for snapshot in self._all()}
        for path in self._folder.glob("*"):
            if path.stem not in known:
                path.unlink(missing_ok=True)

    def _all(self) -> Iterator[Snapshot]:
        for path in self._folder.glob("*.json"):
            with suppress(FileNotFoundError, ValueError, TypeError):  # what a loss of power left is none
                yield Snapshot(**json.loads(path.read_bytes()))


async def save(box: Box, path: Path) -> None:
    """Writes the writable folders of a sandbox to a file.

    Raises:
        FileError: They cannot be read, or are too large.
    """
    writable = box.started.writable
    command = {
        "op": "pack", "roots": [root for root in _ROOTS if writable is None or not _covers(writable, root)],
        "base": "/", "max_entries": _LIMITS.entries, "max_bytes": _room(box.spec.limits),
        "limit": 2 * _LIMITS.size, "stream": True, "raw": True, "timeout_s": _TIMEOUT_S,
    }  # fmt: skip
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:  # noqa: ASYNC230 (writes to a local file's cache)

        async def sink(which: int, data: bytes) -> None:
            if not which:
                file.write(data)

        result = (await box.perform(command, b"", sink)).result
        if result.exit_code != 0 or result.truncated:
            why = result.stderr.decode(errors="replace").strip() or "too large"
            raise FileError(f"a snapshot of sandbox {box.id} could not be taken: {why}")
        if writable is not None:
            await asyncio.to_thread(_save_upper, writable, file, _gone(path))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _room(limits: Limits) -> int:
    """Returns how many bytes of files there can be; more are holes, which the host would have to fill."""
    return min(_LIMITS.size, len(_ROOTS) * max(limits.tmpfs_bytes, limits.disk_bytes) + (1 << 20))


def _covers(writable: Writable, root: str) -> bool:
    return root != "/dev/shm" and root.startswith(f"/{writable.at}")


def _save_upper(writable: Writable, file: IO[bytes], gone: Path) -> None:
    upper = Upper(writable, _LIMITS)
    for data in upper.pack():
        file.write(data)
    gone.write_text(json.dumps(upper.gone))


def _gone(tree: Path) -> Path:
    """Returns the file of the names that are removed before a tree is unpacked."""
    return tree.with_suffix(".gone")


async def load(box: Box, path: Path) -> None:
    """Makes the files of a snapshot in a fresh sandbox.

    Raises:
        PolicyError: The backend has no snapshots.
        UnsafeTreeError: It is not what a snapshot has.
        DiskFullError: They do not fit.
        FileError: They cannot be made.
    """
    box.check_snapshots()
    whole = box.started.writable is not None
    for name in json.loads(_gone(path).read_text()) if _gone(path).exists() else ():
        await _do(box, {"op": "remove", "path": f"/{name}"}, b"", unless=b"FileNotFoundError")
    for batch in batches(_checked(path, whole)):
        await _do(box, {"op": "unpack", "path": "/"}, batch)


async def _do(box: Box, command: dict[str, Any], body: bytes, unless: bytes = b"\0") -> None:
    result = (await box.perform({**command, "timeout_s": _TIMEOUT_S, "limit": 4096}, body)).result
    if result.exit_code != 0 and unless not in result.stderr:
        kind = DiskFullError if result.disk_full else FileError
        raise kind(f"a snapshot could not be unpacked: {result.stderr.decode(errors='replace').strip()}")


def _checked(path: Path, whole: bool) -> Iterator[tuple[Any, bytes]]:
    roots = tuple(root.lstrip("/") for root in _ROOTS)
    parser, checker = Parser(), Checker(_LIMITS, links_out=True)
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            for entry, content in parser.feed(data):
                if not (whole or entry.path.startswith(roots)):
                    raise UnsafeTreeError(f"a snapshot has no {entry.path!r}")
                yield checker.check(entry), content
    parser.end()
