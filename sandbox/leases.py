"""The node's lease file: which sandboxes it holds for whom, on disk before anybody hears of them.

Labels of a container cannot change after its creation, and a sandbox of the warm pool has no owner then. So
who owns what, for how long, and under which key it was asked for, stands here: a node that was killed knows
at its next start what its owners still count on, and the reaper removes whatever is not here. What is not in
the file is unknown, and unknown means expired.

Records are appended, with checksums; a caller waits until its record is on disk, and all that wait share one
write (*group commit*). A group is one record: it is held whole or not at all. The file is written anew with
what still holds at each start, and whenever most of it is of the past.

Version N reads N - 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandbox.errors import InfrastructureError, JournalError
from sandbox.journal_file import START, Form, encode, opening, scan, sync_folder, version_of

FILE = "leases"
LEASES = Form("lease file", b"TMPRLEAS", 1, {})
_COMPACT, _RECORD = 1 << 20, 512
_LOG = logging.getLogger("sandbox.node")


@dataclass(frozen=True, slots=True)
class Lease:
    """One sandbox that is held.

    Attributes:
        sandbox: Its id.
        name: What its backend calls this generation of it.
        owner: Whose it is; nobody's while it waits in a pool.
        lease_s: How long it outlives the owner's last client.
        key: Under which its creation was asked for.
        backend: On which it is.
        boot: The run of the node that started it.
        pool: The warm pool that it was started for.
        journal: Whether its commands are written down, so that it can be made anew.
    """

    sandbox: str
    name: str
    owner: str
    lease_s: float
    key: str
    backend: str
    boot: str
    pool: str = ""
    journal: bool = True


@dataclass(slots=True)
class LeaseFile:
    """An open lease file. The node that holds the state folder is the only writer.

    `live` are the sandboxes of this run of the node, `lost` those that an earlier run took along and that
    their owners may still ask for; both by id.
    """

    path: Path
    boot: str
    live: dict[str, Lease] = field(default_factory=dict[str, Lease])
    lost: dict[str, Lease] = field(default_factory=dict[str, Lease])
    syncs: int = 0
    _fd: int = -1
    _end: int = START
    _opened: float = field(default_factory=time.monotonic)
    _waiting: list[tuple[bytes, asyncio.Future[None]]] = field(
        default_factory=list[tuple[bytes, "asyncio.Future[None]"]]
    )
    _writer: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, state_dir: Path, boot: str) -> LeaseFile:
        """Reads what an earlier run of the node left, and begins the file anew with it.

        A damaged file is kept beside as `leases.damaged`; what could not be read of it counts as expired.

        Raises:
            JournalError: It is of a version that is not read here.
            OSError: It cannot be written.
        """
        leases = cls(state_dir / FILE, boot)
        if leases.path.exists():
            leases._load()
        # What waited in a pool when its node died is nobody's.
        leases.lost = {name: lease for name, lease in leases.lost.items() if lease.owner}
        leases._rewrite()
        return leases

    def _load(self) -> None:
        with self.path.open("rb") as file:
            start = file.read(START)
        if len(start) < START:  # a crash before its first write
            return
        version_of(start, self.path, LEASES)
        try:
            for _, record, _, _ in scan(self.path, LEASES):
                self._take(record)
        except (JournalError, KeyError, TypeError) as error:
            aside = self.path.with_suffix(".damaged")
            self.path.replace(aside)
            _LOG.error("%s; what stood behind counts as expired, the file is kept as %s", error, aside)

    def _take(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "held":
            self.lost |= {one["sandbox"]: Lease(**one) for one in record["leases"]}
        elif record["kind"] == "ended":
            for sandbox in record["sandboxes"]:
                self.lost.pop(sandbox, None)

    async def hold(self, *leases: Lease) -> None:
        """Writes down that sandboxes are held, all in one record; returns when that is on disk.

        Raises:
            InfrastructureError: It cannot be written; then none is held.
        """
        before = {one.sandbox: self.lost.pop(one.sandbox, None) for one in leases}
        self.live |= {one.sandbox: one for one in leases}
        try:
            await self._commit({"kind": "held", "leases": [asdict(one) for one in leases]})
        except InfrastructureError:
            for sandbox, lease in before.items():
                self.live.pop(sandbox, None)
                self.lost |= {sandbox: lease} if lease else {}
            raise

    async def end(self, *sandboxes: str) -> None:
        """Writes down that sandboxes are held no more; returns when that is on disk.

        Raises:
            InfrastructureError: It cannot be written; they are not held nevertheless.
        """
        known = [name for name in sandboxes if name in self.live or name in self.lost]
        for name in known:
            self.live.pop(name, None)
            self.lost.pop(name, None)
        if known:
            await self._commit({"kind": "ended", "sandboxes": known})

    async def drop(self, over: Callable[[Lease], bool]) -> None:
        """Ends what earlier runs had and of which `over` says that nothing can come back."""
        await self.end(*[name for name, lease in self.lost.items() if over(lease)])

    def by_key(self, owner: str, key: str) -> Lease | None:
        """Returns what an earlier run of the node had made for an owner under a key."""
        found = (one for one in self.lost.values() if (one.owner, one.key) == (owner, key))
        return next(found, None) if key else None

    def of(self, owner: str) -> list[Lease]:
        """Returns what an earlier run of the node had for an owner."""
        return [one for one in self.lost.values() if one.owner == owner]

    def expired(self, present: Mapping[str, Any]) -> list[Lease]:
        """Returns what earlier runs had for owners who have not come back within their lease.

        Args:
            present: The owners that the node knows of now.
        """
        since = time.monotonic() - self._opened
        return [one for one in self.lost.values() if one.owner not in present and since > one.lease_s]

    async def close(self) -> None:
        """Lets go of the file, which stays."""
        if self._writer is not None:
            await self._writer
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _commit(self, record: Mapping[str, Any]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((encode(record), done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        await done

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            problem: OSError | None = None
            try:
                await asyncio.to_thread(self._append, b"".join(data for data, _ in batch))
            except OSError as error:
                problem = error
            for _, done in batch:
                if done.done():
                    continue
                if problem is None:
                    done.set_result(None)
                else:
                    what = f"the lease file {self.path} cannot be written: {problem.strerror}; make room"
                    done.set_exception(InfrastructureError(what))

    def _append(self, data: bytes) -> None:
        if self._end > _COMPACT and self._end > 4 * _RECORD * (len(self.live) + len(self.lost)):
            with contextlib.suppress(OSError):  # a file that stays long still takes what follows
                self._rewrite()
        try:
            if os.pwrite(self._fd, data, self._end) < len(data):
                raise OSError(errno.ENOSPC, "the disk is full")
            os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)
        self.syncs += 1

    def _rewrite(self) -> None:
        fresh = self.path.with_suffix(".new")
        held = [asdict(one) for one in (*list(self.lost.values()), *list(self.live.values()))]
        data = opening(LEASES.version, LEASES)
        data += encode({"kind": "held", "leases": held}) if held else b""
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, "the disk is full")
            os.fsync(fd)
            fresh.replace(self.path)
        except OSError:
            os.close(fd)
            raise
        old, self._fd, self._end = self._fd, fd, len(data)
        if old >= 0:
            os.close(old)
        sync_folder(self.path.parent)
