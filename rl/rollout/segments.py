"""The files of one token log: which there are, in which order they count, how they are rewritten smaller."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl.rollout.frames import (
    HEADER_BYTES,
    Damage,
    Kind,
    Scan,
    SegmentError,
    StepWriter,
    header,
    read_header,
    record,
    scan,
    slots_of,
    step_rows,
)

_SUFFIX = ".wal"


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the log; a rewritten one also stands for the numbers from `covers_from` on."""

    path: Path
    number: int
    covers_from: int

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
            number, covers_from = read_header(head, path.name)
        except SegmentError as error:
            damage.unreadable_segments.append(str(error))
            continue
        for old in [old for old in found if covers_from <= old.number < number]:
            old.path.unlink()
            found.remove(old)
        found.append(Segment(path, number, covers_from))
    return found


def rewrite(segments: list[Segment], live: set[int], ended: set[int]) -> Segment:
    """Replaces the segments by one that keeps all records of `live` slots and the results of `ended` ones.

    The new file takes the place of the last segment by a rename; a crash leaves the old files or the new one.
    """
    last = segments[-1]
    covers_from = min(segment.covers_from for segment in segments)
    partial = last.path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(header(last.number, covers_from))
        for segment in segments:
            file.writelines(_kept(segment.path.read_bytes(), live, ended))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(last.path)
    sync_folder(last.path.parent)
    for segment in segments[:-1]:
        segment.path.unlink()
    return Segment(last.path, last.number, covers_from)


def sync_folder(folder: Path) -> None:
    """Makes renames and new files in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _kept(data: bytes, live: set[int], ended: set[int]) -> Iterator[bytes]:
    wanted = np.fromiter(live, np.uint32, len(live))
    found = scan(data, Damage())
    done = 0
    for item in found.others:
        yield from _kept_steps(data, found, done, item.steps_before, wanted)
        done = item.steps_before
        if item.kind != Kind.CONSUMED:
            slot = next(slots_of(data, item))
            if slot in (ended if item.kind == Kind.END else live):
                yield record(Kind(item.kind), data[item.start : item.end])
    yield from _kept_steps(data, found, done, len(found.starts), wanted)


def _kept_steps(data: bytes, found: Scan, first: int, last: int, wanted: np.ndarray) -> Iterator[bytes]:
    for start, end in zip(found.starts[first:last], found.ends[first:last], strict=True):
        version, rows = step_rows(data, start, end)
        rows = rows[np.isin(rows["slot"], wanted)]
        if rows.size:
            writer = StepWriter.of(len(rows))
            writer.rows[:] = rows
            yield writer.record(version)
