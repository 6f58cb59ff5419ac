"""The journal of a sandbox: what it was told to do and what came of it, kept by the node, outside of it.

A command is written down before it is sent (*intent*: its place in the sequence, its digest, the command
itself) and its result before the caller hears of it. What has an intent and no result is UNKNOWN: nobody
can say how far it came, and it is never run again by itself.

The bytes are those of `journal_file.py`; opening a journal cuts its torn tail off.

Records reach the kernel before what they announce happens, so no death of a process loses one. The first
record is on disk before the sandbox is handed out, the others within `SYNC_S` seconds: a power cut takes
the sandboxes along, and can only cost results that must then be made again in a fresh generation.

Version N reads N - 1, and rewrites the file as N when it opens it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from sandbox.errors import JournalError, JournalMismatchError, SandboxError, from_wire, to_wire
from sandbox.journal_file import RECORD, START, Record, decode, encode, opening, scan, sync_folder, upgrade
from sandbox.outcome import Outcome

SYNC_S = 0.25
BUDGET = 64 << 20
"""Bytes of a journal; beyond, commands and outputs are kept as hashes only, and cannot be given back."""

_NOT_DIGESTED = frozenset({"timeout_s", "limit"})


@dataclass(slots=True)
class Entry:
    """One command: its digest, and where in the file its intent and its result are (0: there is none)."""

    digest: str
    operation: str
    idempotent: bool
    intent: int
    result: int = 0
    runs: int = 1


@dataclass(slots=True)
class Journal:
    """An open journal. Its node is the only writer."""

    path: Path
    head: Record
    _fd: int
    _end: int
    entries: dict[int, Entry] = field(default_factory=dict[int, Entry])
    generation: int = 1
    dirty: bool = False
    torn: int = 0

    @classmethod
    def create(
        cls, path: Path, head: Mapping[str, Any], past: Journal | None = None, until: int = 0
    ) -> Journal:
        """Starts a journal whose first record is `head`; returns when that is on disk.

        Args:
            path: Of a file that does not exist.
            head: Who the sandbox is, what it was asked to be and whose it is: JSON values.
            past: The journal of the sandbox of which this one is a fork.
            until: The last command of `past` that this one shares.
        """
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(fd, opening())
        journal = cls(path, dict(head), fd, START)
        journal._append({"kind": "sandbox", **head})
        if past is not None:
            journal._inherit(past, until)
        journal.sync()
        sync_folder(path.parent)
        return journal

    def _inherit(self, past: Journal, until: int) -> None:
        for _, record, body, _ in scan(past.path):
            if 0 < record.get("seq", 0) <= until:
                self._take(self._append({**record, "generation": 1}, body), record)

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Opens a journal that exists, without its torn tail.

        Raises:
            JournalError: It is damaged, or of a version that is not read here.
        """
        upgrade(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            journal = cls(path, {}, fd, START)
            journal._load()
        except BaseException:
            os.close(fd)
            raise
        return journal

    def _load(self) -> None:
        for offset, record, _, end in scan(self.path):
            try:
                self._take(offset, record)
            except (KeyError, TypeError) as error:
                what = f"has a record at byte {offset} that is none of a journal"
                raise JournalError(f"the journal {self.path} {what}") from error
            self._end = end
        self.torn = os.fstat(self._fd).st_size - self._end
        if self.torn:
            os.ftruncate(self._fd, self._end)
        if not self.head:
            raise JournalError(f"the journal {self.path} does not say whose it is: its start is missing")

    def _take(self, offset: int, record: Record) -> None:
        kind = record["kind"]
        if kind == "sandbox":
            self.head = {name: value for name, value in record.items() if name != "kind"}
        elif kind == "intent":
            self.entries[record["seq"]] = Entry(record["digest"], record["op"], record["idempotent"], offset)
        elif kind in ("result", "error"):
            self.entries[record["seq"]].result = offset
        elif kind == "rerun":
            self.entries[record["seq"]].runs += 1
        elif kind == "generation":
            self.generation = record["generation"]

    @property
    def last(self) -> int:
        """The number of the last command; they count from 1."""
        return len(self.entries)

    def intend(self, command: Mapping[str, Any], body: bytes, *, idempotent: bool) -> int:
        """Writes down that a command is about to run; returns its number."""
        seq = self.last + 1
        data = json.dumps(command).encode()
        kept = self._end + len(data) + len(body) <= BUDGET
        record: Record = {
            "kind": "intent",
            "seq": seq,
            "generation": self.generation,
            "op": command["op"],
            "digest": digest(command, body),
            "idempotent": idempotent,
            "command_bytes": len(data) if kept else -1,
        }
        offset = self._append(record, data + body if kept else b"")
        self._take(offset, record)
        return seq

    def finish(self, seq: int, outcome: Outcome) -> None:
        """Writes down what a command returned."""
        output = outcome.body()
        kept = self._end + len(output) <= BUDGET
        record: Record = {
            "kind": "result",
            "seq": seq,
            "generation": self.generation,
            **outcome.fields(),
            "output_sha256": hashlib.sha256(output).hexdigest(),
            "output_bytes": len(output) if kept else -1,
        }
        self._take(self._append(record, output if kept else b""), record)

    def fail(self, seq: int, error: SandboxError) -> None:
        """Writes down that a command did not run, and why."""
        record: Record = {"kind": "error", "seq": seq, "error": to_wire(error)}
        self._take(self._append(record), record)

    def rerun(self, seq: int) -> None:
        """Writes down that an unknown command is run once more in the same generation."""
        record: Record = {"kind": "rerun", "seq": seq, "generation": self.generation}
        self._take(self._append(record), record)

    def renew(self, replayed: int) -> None:
        """Writes down that the sandbox was made anew and `replayed` finished commands ran in it again."""
        record: Record = {"kind": "generation", "generation": self.generation + 1, "replayed": replayed}
        self._take(self._append(record), record)

    def match(self, seq: int, command: Mapping[str, Any], body: bytes) -> Entry:
        """Returns the entry of a command that a caller replays.

        Raises:
            JournalMismatchError: The journal has another command there, or none.
        """
        entry = self.entries.get(seq)
        if entry is None:
            raise JournalMismatchError(f"the journal has {self.last} commands, not a command {seq}")
        if entry.digest != digest(command, body):
            raise JournalMismatchError(
                f"command {seq} ({words(command)}) is not the one that ran ({self._words_of(entry)}): "
                "the caller has gone another way; start it on a sandbox of its own"
            )
        return entry

    def result(self, seq: int) -> Outcome:
        """Returns the recorded outcome of a finished command.

        Raises:
            SandboxError: The one with which the command did not run.
            JournalError: Only the hash of its output was kept.
        """
        record, body = self._read(self.entries[seq].result)
        if record["kind"] == "error":
            raise from_wire(record["error"])
        if record["output_bytes"] < 0:
            raise JournalError(
                f"of command {seq} only the hash of its output was kept: the journal is at its {BUDGET} bytes"
            )
        return Outcome.of(record, body)

    def count(self, operation: str, until: int) -> int:
        """Returns how many of the first `until` commands are of a kind."""
        return sum(self.entries[seq].operation == operation for seq in range(1, until + 1))

    def failed(self, seq: int) -> bool:
        """Whether a finished command is one that did not run."""
        return self._read(self.entries[seq].result)[0]["kind"] == "error"

    def command(self, seq: int) -> tuple[Record, bytes]:
        """Returns a command as it was sent.

        Raises:
            JournalError: Only its digest was kept.
        """
        record, body = self._read(self.entries[seq].intent)
        size = record["command_bytes"]
        if size < 0:
            raise JournalError(f"of command {seq} only the digest was kept: it cannot be run again")
        return json.loads(body[:size]), body[size:]

    def sync(self) -> None:
        """Returns when all is on disk."""
        self.dirty = False
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Lets go of the file, which stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Deletes the journal."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _append(self, record: Mapping[str, Any], body: bytes = b"") -> int:
        data, offset = encode(record, body), self._end
        try:
            if os.pwrite(self._fd, data, offset) < len(data):
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError as error:
            with contextlib.suppress(OSError):  # else the rest of it stands behind the next record
                os.ftruncate(self._fd, offset)
            raise JournalError(f"the journal {self.path} cannot be written: {error.strerror}") from error
        self._end, self.dirty = offset + len(data), True
        return offset

    def _read(self, offset: int) -> tuple[Record, bytes]:
        sizes = os.pread(self._fd, RECORD.size, offset)
        head, size, _ = RECORD.unpack(sizes.ljust(RECORD.size, b"\0"))
        found = decode(os.pread(self._fd, RECORD.size + head + size, offset))
        if found is None:
            raise JournalError(f"the journal {self.path} has changed at byte {offset}")
        return found

    def _words_of(self, entry: Entry) -> str:
        record, body = self._read(entry.intent)
        size = record["command_bytes"]
        return words(json.loads(body[:size])) if size >= 0 else f"digest {entry.digest[:12]}"


def digest(command: Mapping[str, Any], body: bytes) -> str:
    """Returns the SHA-256 of what a command does: all of it but its time and output limits."""
    what = {name: value for name, value in command.items() if name not in _NOT_DIGESTED}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode() + b"\0" + body).hexdigest()


def words(command: Mapping[str, Any]) -> str:
    """Returns a command in a few words, for messages."""
    argv = cast("Sequence[str]", command.get("argv", ()))
    shown = " ".join(argv[2:] if argv[:2] == ["/bin/sh", "-c"] else argv) or command.get("path", "")
    return f"{command['op']} {shown}"[:80].strip()
