"""The token log: what was sampled, when it was sampled, so that a kill at any moment loses next to nothing.

It is written in the engine's process: the engine's thread hands over the tokens of each decode step, the
event loop appends what happens between turns, and a small thread makes one frame of columns of each step and
writes all of it out before any of it is `flush_ms` old. Before a tool call is sent its turn is flushed, so
that nothing the world has seen is ever sampled differently. A sample's records are dropped by compaction once
it is consumed (trained or filtered, in a durable checkpoint).
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from envs.types import FinishReason, Images, Message, Trajectory, TrajectoryKey
from model import durable
from rl.engines.base import StepFrame
from rl.rollout import codec
from rl.rollout.assignment import Assignment
from rl.rollout.ends import in_steps
from rl.rollout.flusher import Flusher
from rl.rollout.frames import Buffer, Damage, Kind, header, ints, record
from rl.rollout.lanes import Lanes, PendingStep
from rl.rollout.recovery import rebuild
from rl.rollout.segments import (
    Keep,
    Segment,
    list_segments,
    next_number,
    release,
    reserve,
    rewrite,
    segment_path,
)
from rl.rollout.state import FINISHES, LoggedSample, Recovery, SandboxPlace

_BUFFERS = 512
"""Most buffers of one call of the system, which takes 1024."""


class TokenLogError(RuntimeError):
    """The log cannot be written, or another process writes it: what happened and what to do."""


class TokenLog:
    """An append-only log in a folder of its own; opening it recovers what an earlier process left.

    All methods may be called from any thread. `recovery` holds the unfinished and the finished, unconsumed
    samples of earlier processes. Sessions that were never started here (evaluation) are ignored.

    Args:
        folder: Made when it is missing; one process may write it at a time.
        flush_ms: The longest time that an appended record stays in memory; 0 writes every record at once.
        fsync: Whether flushes also wait for the disk, which survives the loss of power.
        segment_bytes: The size at which a new file begins.

    Raises:
        TokenLogError: Another living process writes this folder.
    """

    def __init__(
        self, folder: Path, *, flush_ms: float = 50.0, fsync: bool = False, segment_bytes: int = 64 << 20
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._fsync, self._segment_bytes = folder, fsync, segment_bytes
        self._guard = _lock_folder(folder)
        damage = Damage()
        self._sealed: list[Segment] = list_segments(folder, damage)
        self.recovery: Recovery = rebuild(self._sealed, damage)
        for last in self._sealed[-1:]:  # whose writer may have died
            release(last.path, last.size)
        self._lock, self._io = threading.Lock(), threading.Lock()
        self._frames: deque[StepFrame] = deque()
        self._records: list[bytes | PendingStep] = []
        self._lanes = Lanes()
        self._slots: dict[TrajectoryKey, int] = {}
        self._live: set[int] = set()
        self._ended: set[int] = set()
        self._leaning: set[int] = set(self.recovery.leaning)
        self._adopt(self.recovery)
        self._next_slot = self.recovery.next_slot
        self._failure: Exception | None = None
        self._counts = {"tokens": 0, "frames": 0, "bytes": 0, "flushes": 0, "compactions": 0}
        self._compacted_bytes = self._sealed_bytes()
        self._file, self._size = self._new_segment()
        self._reserved = 0
        self._closed = False
        # an error is kept in `_failure` too: the next append raises it
        self._flusher = Flusher(self.flush, flush_ms / 1e3, TokenLogError) if flush_ms > 0 else None

    # What happens between turns: called by the event loop.

    def start(self, assignment: Assignment) -> None:
        """A sample begins: assignment, task and seeds."""
        body = json.dumps(codec.assignment_to_json(assignment)).encode()
        with self._lock:
            self._place_steps()
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            self._slots[assignment.key] = slot
            self._live.add(slot)
            self._lanes.open(assignment.session, slot)
            self._append(Kind.START, ints("I", slot), body)
        self._appended()

    def resume(self, sample: LoggedSample) -> None:
        """A recovered sample goes on after exactly what `sample` holds; whatever else was logged is void."""
        turn = max(len(sample.turns) - 1, 0)
        last = sample.turns[-1] if sample.turns else None
        tokens, results = (len(last.tokens), len(last.results)) if last else (0, 0)
        with self._lock:
            self._place_steps()
            slot = self._slots[sample.assignment.key]
            whole = {i: len(turn.tokens) for i, turn in enumerate(sample.turns) if turn.finish is not None}
            self._lanes.open(sample.assignment.session, slot, tokens, whole)
            closed = int(last is not None and last.finish is not None)
            self._append(Kind.RESET, ints("IIIIII", slot, len(sample.turns), turn, tokens, closed, results))
        self._appended()

    def begin(
        self,
        session: str,
        turn: int,
        prompt_ids: Sequence[int],
        *,
        new_branch: bool,
        images: Images | None = None,
    ) -> None:
        """A turn is about to be sampled after `prompt_ids`, its new tokens with `images` among them."""
        ids = struct.pack(f"<{len(prompt_ids)}i", *prompt_ids)
        with self._lock:
            self._place_steps()
            if (slot := self._lanes.slot(session)) is not None:
                self._lanes.begin_turn(session)
                self._append(Kind.BEGIN, ints("III", slot, turn, int(new_branch)), ids)
                if images is not None:
                    self._append(Kind.IMAGES, ints("II", slot, turn), codec.images_to_bytes(images))
        self._appended()

    def turn(
        self,
        session: str,
        turn: int,
        tokens: int,
        finish: FinishReason,
        replay_starts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """A turn of `tokens` tokens was sampled to its end, after prefills that began at these places."""
        starts = list(chain.from_iterable(replay_starts))
        payload = ints(f"III{len(starts)}I", turn, tokens, FINISHES.index(finish), *starts)
        with self._lock:
            self._place_steps()
            if (slot := self._lanes.slot(session)) is not None:
                self._lanes.end_turn(session, turn, tokens)
                self._append(Kind.TURN, ints("I", slot), payload)
        self._appended()

    def result(self, session: str, turn: int, number: int, message: Message) -> None:
        """The result of the turn's tool call `number` (0-based)."""
        body = json.dumps(codec.message_to_json(message)).encode()
        self._about(session, Kind.RESULT, ints("II", turn, number) + body)

    def place(self, session: str, place: SandboxPlace) -> None:
        """Where the sample's own sandbox stands now; the last such record counts."""
        self._about(session, Kind.PLACE, json.dumps(asdict(place)).encode())

    def end(self, session: str, trajectory: Trajectory) -> None:
        """A sample ended; its whole result is kept until it is consumed."""
        in_log = in_steps(trajectory, self._lanes.logged_turns(session))
        parts = codec.trajectory_to_parts(trajectory, in_log)
        with self._lock:
            self._place_steps()
            if (slot := self._lanes.close(session)) is not None:
                self._live.discard(slot)
                self._ended.add(slot)
                if in_log:
                    self._leaning.add(slot)
                self._append(Kind.END, ints("I", slot), *parts)
        self._appended()

    def consumed(self, keys: Iterable[TrajectoryKey]) -> None:
        """These samples will never be asked for again; keys that the log does not know are ignored."""
        with self._lock:
            slots = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
            self._live.difference_update(slots)
            self._ended.difference_update(slots)
            self._leaning.difference_update(slots)
            if slots:
                self._append(Kind.CONSUMED, ints(f"{len(slots)}I", *slots))
        self._appended()

    # What happens within a turn: called by the engine's thread.

    def on_step(self, frame: StepFrame) -> None:
        """Takes the tokens of one decode step, looked at later; the engine's step listener."""
        if self._failure is not None:
            self._raise_failure()
        self._frames.append(frame)
        self._appended(step=True)

    # Writing it out.

    def flush(self, *, sync: bool | None = None) -> None:
        """Writes everything appended so far; with `sync` (default: as configured) also waits for the disk.

        Raises:
            TokenLogError: The file cannot be written; the log stays unusable.
        """
        with self._io:
            with self._lock:
                records = self._take()
            self._write(records, sync=self._fsync if sync is None else sync)

    @property
    def waits_for_disk(self) -> bool:
        """Whether a forced flush may block for milliseconds, so that an event loop should not wait for it."""
        return self._fsync

    @property
    def wants_compaction(self) -> bool:
        """Whether the log grew to twice what the last compaction left, plus a segment."""
        return self._sealed_bytes() + self._size > 2 * self._compacted_bytes + self._segment_bytes

    def compact(self) -> None:
        """Rewrites all full segments without what was consumed; blocks, but not the writers."""
        with self._io:
            with self._lock:  # what ended by now is in the segments below, not only in memory
                records = self._take()
                keep = Keep(set(self._live), set(self._ended), set(self._leaning))
            self._write(records, sync=True)
            self._rotate()
            sealed = list(self._sealed)
        compacted = rewrite(sealed, keep)
        with self._io:
            self._sealed = [compacted, *self._sealed[len(sealed) :]]
            self._compacted_bytes = compacted.size
            self._counts["compactions"] += 1

    def close(self) -> None:
        """Writes the rest and lets another process open the folder. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._flusher is not None:
            self._flusher.close()
        try:
            self.flush()
            release(self._file.fileno(), self._size)
        finally:
            self._file.close()
            self._guard.close()

    def stats(self) -> dict[str, float]:
        """Counters since opening, and the bytes on disk now."""
        return {
            **{name: float(count) for name, count in self._counts.items()},
            "disk_bytes": float(self._sealed_bytes() + self._size),
            "live": float(len(self._live)),
        }

    def _adopt(self, recovery: Recovery) -> None:
        for slot, sample in recovery.unfinished.items():
            self._slots[sample.assignment.key] = slot
            self._live.add(slot)
        for slot, trajectory in recovery.finished.items():
            self._slots[trajectory.key] = slot
            self._ended.add(slot)

    def _take(self) -> list[bytes | PendingStep]:
        """All that waits to be written; the caller holds both locks."""
        if self._flusher is not None:
            self._flusher.taken()
        self._place_steps()
        records, self._records = self._records, []
        return records

    def _place_steps(self) -> None:
        """Says of all steps so far whose tokens they have, before that changes; the caller holds the lock.

        The engine's thread only hands steps over: it never waits for another thread here.
        """
        if self._failure is not None:
            self._raise_failure()
        frames = self._frames
        try:
            while frames:
                frame = frames.popleft()
                if frame.replay_starts:
                    self._append_starts(frame)
                if (step := self._lanes.step(frame)) is not None:
                    self._counts["tokens"] += step.count
                    self._counts["frames"] += 1
                    self._records.append(step)
        except Exception as error:  # whatever it is, the engine's thread must hear of it
            self._failure = error
            self._raise_failure()

    def _append_starts(self, frame: StepFrame) -> None:
        for session, (turn, starts) in frame.replay_starts.items():
            if (slot := self._lanes.slot(session)) is not None:
                self._append(Kind.STARTS, ints("II", slot, turn), np.array(starts, "<u4").tobytes())

    def _about(self, session: str, kind: Kind, payload: bytes) -> None:
        with self._lock:
            if (slot := self._lanes.slot(session)) is not None:
                self._append(kind, ints("I", slot), payload)
        self._appended()

    def _append(self, kind: Kind, *payload: bytes) -> None:
        """Queues a record; the caller holds the lock."""
        if self._failure is not None:
            self._raise_failure()
        self._records.append(record(kind, *payload))

    def _appended(self, *, step: bool = False) -> None:
        """After the lock: without a flush interval records are written at once."""
        if self._flusher is None:
            self.flush(sync=False)
        elif step:
            self._flusher.stepped()
        else:
            self._flusher.appended()

    def _write(self, records: Sequence[bytes | PendingStep], *, sync: bool) -> None:
        """Makes the records of steps, writes all of them and rotates; the caller holds the write lock."""
        try:
            buffers: list[Buffer] = []
            size = 0
            for item in records:
                if isinstance(item, bytes):
                    buffers.append(item)
                    size += len(item)
                else:
                    step = item.record()
                    buffers += step.buffers
                    size += step.size
            if buffers:
                if self._size + size > self._reserved:
                    self._reserved += reserve(self._file.fileno(), self._reserved, size)
                _write_all(self._file.fileno(), buffers, size)
            self._size += size
            self._counts["bytes"] += size
            self._counts["flushes"] += bool(records)
            if sync:
                os.fsync(self._file.fileno())
            if self._size >= self._segment_bytes:
                self._rotate()
        except Exception as error:  # whatever it is, the engine's thread must hear of it
            self._failure = error
            self._raise_failure()

    def _rotate(self) -> None:
        release(self._file.fileno(), self._size)
        if self._fsync:
            os.fsync(self._file.fileno())
        self._file.close()
        number = int(Path(self._file.name).stem)
        self._sealed.append(Segment(Path(self._file.name), number, number))
        self._file, self._size = self._new_segment()
        self._reserved = 0

    def _new_segment(self) -> tuple[IO[bytes], int]:
        number = next_number(self._folder)
        file = segment_path(self._folder, number).open("xb", buffering=0)
        head = header(number, number)
        file.write(head)
        durable.sync(self._folder)
        return file, len(head)

    def _sealed_bytes(self) -> int:
        return sum(segment.size for segment in list(self._sealed))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            full = isinstance(self._failure, OSError)
            advice = (
                "free space or make the folder writable" if full else "mend what the engine reports of a step"
            )
            raise TokenLogError(
                f"the token log in {self._folder} cannot be written ({self._failure!r}): {advice}, then "
                "resume the run; what was flushed before is safe"
            ) from self._failure


def _write_all(file: int, buffers: Sequence[Buffer], size: int) -> None:
    """Writes buffers of `size` bytes one after the other, without joining them where they are few."""
    done = os.writev(file, buffers[:_BUFFERS])
    if done < size:  # many buffers, a disk that is nearly full, or a signal
        rest = memoryview(b"".join(buffers))[done:]
        while rest:
            rest = rest[os.write(file, rest) :]


def _lock_folder(folder: Path) -> IO[str]:
    guard = (folder / "lock").open("a+")
    deadline = time.monotonic() + 1.0
    while True:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                guard.seek(0)
                owner = guard.read().strip() or "unknown"
                guard.close()
                raise TokenLogError(
                    f"process {owner} still writes the token log in {folder}: end it, or give this run "
                    "a name of its own"
                ) from None
            time.sleep(0.05)
    guard.truncate(0)
    guard.write(str(os.getpid()))
    guard.flush()
    return guard
