"""The files of one token log: which there are, in which order they count, how they are rewritten smaller."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.durable import sync
from rl.rollout import codec
from rl.rollout.frames import (
    FORMAT,
    HEADER_BYTES,
    Buffer,
    Damage,
    Data,
    Kind,
    SegmentError,
    header,
    read_header,
    record,
    scan,
    slots_of,
)
from rl.rollout.steps import Steps, step_record

_SUFFIX = ".wal"
_ROWS = 4096
"""Most tokens of a step that is rewritten."""
_RESERVE = 16 << 20
"""Bytes of a file that are reserved at a time; a crash leaves up to so many until the log is opened."""
_KEEP_SIZE = 1
_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the log; a rewritten one also stands for the numbers from `covers_from` on."""

    path: Path
    number: int
    covers_from: int
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size


def segment_path(folder: Path, number: int) -> Path:
    """The file of segment `number`."""
    return folder / f"{number:08d}{_SUFFIX}"


def next_number(folder: Path) -> int:
    """A number above every file in the folder, readable or not."""
    return max((int(path.stem) for path in folder.glob(f"*{_SUFFIX}")), default=-1) + 1


def list_segments(folder: Path, damage: Damage) -> list[Segment]:
    """The segments that count, in order; removes what a rewritten one replaced and what was never finished.

    A file whose header cannot be read stays where it is and is named in `damage`.
    """
    for partial in folder.glob("*.partial"):
        partial.unlink()
    found: list[Segment] = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES:  # its writer died before the first record
            damage.torn_bytes += len(head)
            path.unlink()
            continue
        try:
            form, number, covers_from = read_header(head, path.name)
        except SegmentError as error:
            damage.unreadable_segments.append(str(error))
            continue
        for old in [old for old in found if covers_from <= old.number < number]:
            old.path.unlink()
            found.remove(old)
        found.append(Segment(path, number, covers_from, form))
    return found


@dataclass(frozen=True, slots=True)
class Keep:
    """What a rewritten segment keeps: all records of `live` slots, the results of `ended` ones.

    Of those that are `leaning` also the rest, from which they go on when a step turns out to be damaged.
    """

    live: set[int]
    ended: set[int]
    leaning: set[int]

    def record(self, kind: int, slot: int | None) -> bool:
        """Whether a record that is no step stays."""
        if kind == Kind.END:
            return slot in self.ended
        return slot in self.live or slot in self.leaning

    def steps(self, slots: np.ndarray) -> np.ndarray:
        """The numbers of the tokens that stay, of tokens of these slots."""
        wanted = self.live | (self.ended & self.leaning)
        return np.flatnonzero(np.isin(slots, np.fromiter(wanted, np.uint32, len(wanted))))


def rewrite(segments: list[Segment], keep: Keep) -> Segment:
    """Replaces the segments by one without what is not kept.

    The new file takes the place of the last segment by a rename; a crash leaves the old files or the new one.
    """
    last = segments[-1]
    covers_from = min(segment.covers_from for segment in segments)
    partial = last.path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(header(last.number, covers_from))
        for segment in segments:
            file.writelines(_kept(segment, keep))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(last.path)
    sync(last.path.parent)
    for segment in segments[:-1]:
        segment.path.unlink()
    return Segment(last.path, last.number, covers_from)


def reserve(file: int, begin: int, size: int) -> int:
    """Reserves disk space for a file from byte `begin` on, at least `size` bytes; its length stays as it is.

    An append to space that is there already costs the kernel a quarter less. Returns the bytes asked for;
    where a file system has no such call, or no space, nothing else happens.
    """
    size = max(size, _RESERVE)
    if _fallocate is not None:
        _fallocate(file, _KEEP_SIZE, ctypes.c_int64(begin), ctypes.c_int64(size))
    return size


def release(file: int | Path, size: int) -> None:
    """Gives back what `reserve` has beyond the `size` bytes of a file."""
    with suppress(OSError):
        os.truncate(file, size)


def map_file(segment: Segment) -> Data:
    """A segment's bytes, read as they are asked for."""
    with segment.path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _kept(segment: Segment, keep: Keep) -> Iterator[Buffer]:
    data = map_file(segment)
    found = scan(data, segment.format, Damage())
    steps = Steps.read(data, found)
    rows = keep.steps(steps.slot)
    begins = np.concatenate([[0], np.cumsum(steps.counts)])
    done = 0
    for item in found.others:
        if item.kind == Kind.CONSUMED or not keep.record(item.kind, next(slots_of(data, item), None)):
            continue
        until = int(np.searchsorted(rows, begins[item.steps_before]))
        yield from _kept_steps(steps, rows[done:until])
        done = until
        if item.kind == Kind.END and found.format == 1:
            payload = data[item.start : item.end]
            yield record(Kind.END, payload[:4], *codec.text_to_parts(payload[4:]))
        else:
            yield record(Kind(item.kind), data[item.start : item.end])
    yield from _kept_steps(steps, rows[done:])


def _kept_steps(steps: Steps, rows: np.ndarray) -> Iterator[Buffer]:
    """Consecutive tokens as few large steps: one for each run of a policy version."""
    versions = steps.versions(rows)
    cuts = np.flatnonzero(np.diff(versions)) + 1
    for run in np.split(rows, cuts):
        for part in np.split(run, range(_ROWS, len(run), _ROWS)):
            if len(part):
                columns = [
                    getattr(steps, name)[part] for name in ("slot", "turn", "index", "token", "logprob")
                ]
                version = int(steps.versions(part[:1])[0])
                yield from step_record(version, columns, steps.extras(part)).buffers
