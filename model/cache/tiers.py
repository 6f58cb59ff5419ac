"""A folder of cache entries that any number of processes share: bounded in bytes and age, safe against kills.

The same code keeps entries on a disk and, in a memory-backed folder, in host memory, so that a session finds
them whichever process served it before. There is no server and no index: an entry is a file named by its key,
its modification time is when it was last used, and a rename makes it appear whole or not at all.

    FOLDER/v1/<family>/<policy version>/<group>/<name>    entries
    FOLDER/lock     held shared by who writes or drops entries, exclusively by who counts them
    FOLDER/ledger   bytes of all entries, reserved before they are written
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from model.cache.page_file import HEADER_BYTES, VERSION, CorruptFile, Entry, ForeignFile, Kind, pack, unpack
from model.durable import sync

Clock = Callable[[], float]
"""Seconds since the epoch."""

_SUFFIX = {Kind.PAGE: ".page", Kind.TAIL: ".tail"}
_TEMPORARY = ".tmp"
_TEMPORARY_AGE_S = 3600.0
_KEPT_SHARE = 0.9
_SWEEPS_A_LIFE = 4
_RANK_NS = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Address:
    """Where an entry lies: `group` is the folder of those that are looked for together."""

    kind: Kind
    key: bytes
    group: str
    length: int | None = None
    """Tokens of the history, in the name of a tail."""

    @property
    def name(self) -> str:
        """File name."""
        length = "" if self.length is None else f"-{self.length}"
        return f"{self.key.hex()}{length}{_SUFFIX[self.kind]}"


@dataclass(slots=True)
class TierCounters:
    """What has happened to a tier's entries in this process."""

    written: int = 0
    read: int = 0
    evicted: int = 0
    """Dropped for want of room."""
    expired: int = 0
    """Dropped for their age."""
    outdated: int = 0
    """Dropped because the policy's weights were updated."""
    corrupt: int = 0
    """Dropped because cut short or changed."""
    foreign: int = 0
    """Dropped because they were something else than their name said."""
    refused: int = 0
    """Not written: larger than the tier, or its file system was full."""


class FileTier:
    """Entries of one policy version in a shared folder."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        ttl_s: float,
        durable: bool,
        family: str,
        version: int,
        clock: Clock = time.time,
    ) -> None:
        """Open or make `folder`, and drop what is too old or was left half written.

        Args:
            folder: shared by all processes of the tier.
            max_bytes: of all entries, of whatever policy.
            ttl_s: seconds after its last use at which an entry expires.
            durable: whether an entry must survive a loss of power once it is written.
            family: name of the policy.
            version: of its weights.
            clock: tells the time.
        """
        if max_bytes < 1 or ttl_s <= 0:
            raise ValueError(
                f"a cache tier needs bytes and a lifetime: got {max_bytes} bytes and {ttl_s} s; leave the "
                "tier out to do without it"
            )
        self._folder, self._root = folder, folder / f"v{VERSION}"
        self.max_bytes = max_bytes
        self._ttl_s, self._durable = ttl_s, durable
        self._family, self._clock = family, clock
        self.counters = TierCounters()
        self._root.mkdir(parents=True, exist_ok=True)
        self._version = version
        self._swept_at = clock()
        self.sweep()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, headers included."""
        return self._account(0)

    def move_to(self, version: int) -> None:
        """Go over to newer weights: entries of older ones are out of reach from now on, and dropped."""
        self._version = version
        with self._locked(fcntl.LOCK_EX):
            for folder in self._folders(self._root / self._family):
                if folder.name.isdecimal() and int(folder.name) < version:
                    self.counters.outdated += sum(1 for _ in folder.glob("*/*"))
                    shutil.rmtree(folder)
            self._recount(0)

    def has(self, address: Address) -> bool:
        """Whether the entry is there and young enough. It may be gone, or found broken, when it is read."""
        try:
            found = os.stat(self._path(address))
        except FileNotFoundError:
            return False
        return not self._is_old(found.st_mtime)

    def lengths(self, group: str) -> dict[int, bytes]:
        """Lengths of the tails in `group`, and their keys."""
        found: dict[int, bytes] = {}
        try:
            names = os.listdir(self._group(group))
        except FileNotFoundError:
            return found
        for name in names:
            stem, _, suffix = name.partition(".")
            key, _, length = stem.partition("-")
            if f".{suffix}" == _SUFFIX[Kind.TAIL] and length.isdecimal():
                found[int(length)] = bytes.fromhex(key)
        return found

    def get(self, address: Address, rank: int = 0) -> Entry | None:
        """Read an entry and note its use; None when it is not there, too old or broken.

        Args:
            address: of the entry.
            rank: among entries used at once, the higher goes first when room is needed.
        """
        path = self._path(address)
        try:
            with open(path, "rb") as file:
                age, data = os.fstat(file.fileno()), file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.counters.corrupt += self._drop(path)
            return None
        if self._is_old(age.st_mtime):
            self.counters.expired += self._drop(path)
            return None
        try:
            entry = unpack(data, address.kind, address.key)
        except CorruptFile:
            self.counters.corrupt += self._drop(path)
            return None
        except ForeignFile:
            self.counters.foreign += self._drop(path)
            return None
        self.touch(address, rank)
        self.counters.read += 1
        return entry

    def touch(self, address: Address, rank: int = 0) -> None:
        """Note a use of the entry, if it is there."""
        try:
            self._stamp(self._path(address), rank)
        except FileNotFoundError:
            return

    def put(self, entries: Sequence[tuple[Address, Entry]], rank: int = 0) -> int:
        """Write entries; others go for them as needed.

        Args:
            entries: in the order of their rank.
            rank: of the first (see `get`).

        Returns:
            How many were written.
        """
        if self._clock() - self._swept_at > self._ttl_s / _SWEEPS_A_LIFE:
            self.sweep()
        fitting = [item for item in entries if _size(item[1]) <= self.max_bytes * _KEPT_SHARE]
        self.counters.refused += len(entries) - len(fitting)
        written = 0
        for begin, end in _portions([_size(entry) for _, entry in fitting], self.max_bytes // 4):
            portion = fitting[begin:end]
            with self._reserved(sum(_size(entry) for _, entry in portion)):
                written += self._write_all(portion, rank + begin)
        self.counters.written += written
        return written

    def sweep(self) -> None:
        """Drop what has expired, and count the bytes anew."""
        with self._locked(fcntl.LOCK_EX):
            self._recount(0)

    # Files

    def _group(self, group: str) -> Path:
        return self._root / self._family / str(self._version) / group

    def _path(self, address: Address) -> Path:
        return self._group(address.group) / address.name

    def _is_old(self, used_at: float) -> bool:
        return self._clock() - used_at > self._ttl_s

    def _stamp(self, path: Path, rank: int) -> None:
        now = int(self._clock() * 1e9) - rank * _RANK_NS
        os.utime(path, ns=(now, now))

    def _drop(self, path: Path) -> int:
        """Remove an entry; 1 when this process was the one that did."""
        with self._locked(fcntl.LOCK_SH):
            try:
                size = os.stat(path).st_size
                os.unlink(path)
            except FileNotFoundError:
                return 0
            self._account(-size)
        return 1

    def _write_all(self, portion: Sequence[tuple[Address, Entry]], rank: int) -> int:
        """Write entries whose bytes are reserved; gives back the bytes that are not needed."""
        folders: set[Path] = set()
        done = unused = 0
        for i, (address, entry) in enumerate(portion):
            path = self._path(address)
            known = path.exists()
            if not self._write(path, address, entry, rank + i):
                self.counters.refused += len(portion) - i
                unused += sum(_size(entry) for _, entry in portion[i:])
                break
            folders.add(path.parent)
            done += 1
            unused += _size(entry) if known else 0
        if unused:
            self._account(-unused)
        if self._durable:
            for folder in folders:
                sync(folder)
        return done

    def _write(self, path: Path, address: Address, entry: Entry, rank: int) -> bool:
        """Write one entry so that it appears whole; False when the file system is full."""
        temporary = path.with_name(f"{secrets.token_hex(12)}{_TEMPORARY}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.writelines(pack(address.kind, address.key, entry))
                file.flush()
                if self._durable:
                    os.fsync(file.fileno())
            self._stamp(temporary, rank)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in _FULL:
                return False
            raise
        return True

    # Accounting

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with open(self._folder / "lock", "ab") as file:
            fcntl.flock(file, how)
            yield

    @contextmanager
    def _reserved(self, size: int) -> Iterator[None]:
        """Hold the tier open for writing `size` bytes that are counted already."""
        while True:
            with self._locked(fcntl.LOCK_SH):
                if self._account(size) <= self.max_bytes:
                    yield
                    return
                self._account(-size)
            with self._locked(fcntl.LOCK_EX):
                self._recount(size)

    def _account(self, change: int) -> int:
        """Change the bytes in the ledger; returns them. The caller holds the lock, or changes nothing."""
        descriptor = os.open(self._folder / "ledger", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            total = int.from_bytes(os.pread(descriptor, 8, 0), "little", signed=True) + change
            if change:
                os.pwrite(descriptor, total.to_bytes(8, "little", signed=True), 0)
            return total
        finally:
            os.close(descriptor)

    def _recount(self, room: int) -> None:
        """Drop old and left-over files, make `room` bytes, and set the ledger. Holds the lock exclusively."""
        kept: list[tuple[int, int, str]] = []
        for group in self._groups():
            kept += self._survey(group)
        total = sum(size for _, size, _ in kept)
        if total + room > self.max_bytes:
            kept.sort(reverse=True)
            while kept and total + room > self.max_bytes * _KEPT_SHARE:
                _, size, path = kept.pop()
                os.unlink(path)
                total -= size
                self.counters.evicted += 1
        self._account(total - self._account(0))
        self._swept_at = self._clock()

    def _survey(self, group: Path) -> list[tuple[int, int, str]]:
        """(last use in ns, bytes, path) of a group's entries that stay; an empty group goes."""
        kept: list[tuple[int, int, str]] = []
        others = 0
        with os.scandir(group) as files:
            for file in files:
                found = file.stat()
                if file.name.endswith(_TEMPORARY):
                    # Made in the last hour by the clock of the machine, it may be being written right now.
                    if time.time() - found.st_ctime > _TEMPORARY_AGE_S:
                        os.unlink(file.path)
                    else:
                        others += 1
                elif self._is_old(found.st_mtime):
                    os.unlink(file.path)
                    self.counters.expired += 1
                else:
                    kept.append((found.st_mtime_ns, found.st_size, file.path))
        if not kept and not others:
            group.rmdir()
        return kept

    def _groups(self) -> Iterator[Path]:
        for family in self._folders(self._root):
            for version in self._folders(family):
                yield from self._folders(version)

    @staticmethod
    def _folders(parent: Path) -> list[Path]:
        if not parent.is_dir():
            return []
        with os.scandir(parent) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def memory_backed(folder: Path) -> bool:
    """Whether `folder`, which need not exist yet, is on a file system in memory."""
    place = folder.resolve()
    kinds: dict[Path, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split(" ")
        kinds[Path(mount.replace("\\040", " "))] = kind
    return next((kinds[at] in ("tmpfs", "ramfs") for at in (place, *place.parents) if at in kinds), False)


def _size(entry: Entry) -> int:
    return HEADER_BYTES + len(entry.payload)


def _portions(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Split items into runs of at most `limit` bytes, or of one item."""
    begin = total = 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > limit:
            yield begin, i
            begin, total = i, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)
