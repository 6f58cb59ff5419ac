"""The token log: what was sampled, when it was sampled, so that a kill at any moment loses next to nothing.

It is written in the engine's process: the engine's thread appends the tokens of each decode step as one
frame of columns, the event loop appends what happens between turns, and a small thread writes both out
every `flush_ms`. Before a tool call is sent its turn is flushed, so that nothing the world has seen is ever
sampled differently. A sample's records are dropped by compaction once it is consumed (trained or filtered,
in a durable checkpoint).
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np

from envs.types import FinishReason, Message, Trajectory, TrajectoryKey
from rl.engines.base import StepFrame
from rl.rollout import codec
from rl.rollout.assignment import Assignment
from rl.rollout.ends import without_steps
from rl.rollout.frames import Buffer, Damage, Kind, Unsealed, header, ints, record
from rl.rollout.lanes import Lanes
from rl.rollout.recovery import rebuild
from rl.rollout.segments import Keep, Segment, list_segments, next_number, rewrite, segment_path, sync_folder
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
        self._lock, self._io = threading.Lock(), threading.Lock()
        self._records: list[Unsealed] = []
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
        self._flush_s = flush_ms / 1e3
        self._closing = threading.Event()
        self._flusher: threading.Thread | None = None
        if flush_ms > 0:
            self._flusher = threading.Thread(target=self._flush_forever, name="token-log", daemon=True)
            self._flusher.start()

    # What happens between turns: called by the event loop.

    def start(self, assignment: Assignment) -> None:
        """A sample begins: assignment, task and seeds."""
        body = json.dumps(codec.assignment_to_json(assignment)).encode()
        with self._appending():
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            self._slots[assignment.key] = slot
            self._live.add(slot)
            self._lanes.open(assignment.session, slot)
            self._append(Kind.START, ints("I", slot), body)

    def resume(self, sample: LoggedSample) -> None:
        """A recovered sample goes on after exactly what `sample` holds; whatever else was logged is void."""
        turn = max(len(sample.turns) - 1, 0)
        last = sample.turns[-1] if sample.turns else None
        tokens, results = (len(last.tokens), len(last.results)) if last else (0, 0)
        with self._appending():
            slot = self._slots[sample.assignment.key]
            whole = {i: len(turn.tokens) for i, turn in enumerate(sample.turns) if turn.finish is not None}
            self._lanes.open(sample.assignment.session, slot, tokens, whole)
            closed = int(last is not None and last.finish is not None)
            self._append(Kind.RESET, ints("IIIIII", slot, len(sample.turns), turn, tokens, closed, results))

    def begin(self, session: str, turn: int, prompt_ids: Sequence[int], *, new_branch: bool) -> None:
        """A turn is about to be sampled after `prompt_ids`, its new tokens."""
        ids = np.asarray(prompt_ids, "<i4").tobytes()
        with self._appending():
            if (slot := self._lanes.slot(session)) is not None:
                self._lanes.begin_turn(session)
                self._append(Kind.BEGIN, ints("III", slot, turn, int(new_branch)), ids)

    def turn(
        self,
        session: str,
        turn: int,
        tokens: int,
        finish: FinishReason,
        replay_starts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """A turn of `tokens` tokens was sampled to its end, after prefills that began at these places."""
        payload = ints("III", turn, tokens, FINISHES.index(finish)) + np.array(replay_starts, "<u4").tobytes()
        with self._appending():
            if (slot := self._lanes.slot(session)) is not None:
                self._lanes.end_turn(session, turn, tokens)
                self._append(Kind.TURN, ints("I", slot), payload)

    def result(self, session: str, turn: int, number: int, message: Message) -> None:
        """The result of the turn's tool call `number` (0-based)."""
        body = json.dumps(codec.message_to_json(message)).encode()
        self._about(session, Kind.RESULT, ints("II", turn, number) + body)

    def place(self, session: str, place: SandboxPlace) -> None:
        """Where the sample's own sandbox stands now; the last such record counts."""
        self._about(session, Kind.PLACE, json.dumps(asdict(place)).encode())

    def end(self, session: str, trajectory: Trajectory) -> None:
        """A sample ended; its whole result is kept until it is consumed."""
        shorter, in_steps = without_steps(trajectory, self._lanes.logged_turns(session))
        parts = codec.trajectory_to_parts(shorter, in_steps)
        with self._appending():
            if (slot := self._lanes.close(session)) is not None:
                self._live.discard(slot)
                self._ended.add(slot)
                if in_steps:
                    self._leaning.add(slot)
                self._append(Kind.END, ints("I", slot), *parts)

    def consumed(self, keys: Iterable[TrajectoryKey]) -> None:
        """These samples will never be asked for again; keys that the log does not know are ignored."""
        with self._appending():
            slots = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
            self._live.difference_update(slots)
            self._ended.difference_update(slots)
            self._leaning.difference_update(slots)
            if slots:
                self._append(Kind.CONSUMED, np.array(slots, "<u4").tobytes())

    # What happens within a turn: called by the engine's thread.

    def on_step(self, frame: StepFrame) -> None:
        """Appends the tokens of one decode step; the engine's step listener."""
        with self._appending():
            self._raise_failure()
            step, tokens = self._lanes.step(frame)
            if step is not None:
                self._counts["tokens"] += tokens
                self._counts["frames"] += 1
                self._records.append(step)

    # Writing it out.

    def flush(self, *, sync: bool | None = None) -> None:
        """Writes everything appended so far; with `sync` (default: as configured) also waits for the disk.

        Raises:
            TokenLogError: The file cannot be written; the log stays unusable.
        """
        with self._io:
            with self._lock:
                self._raise_failure()
                records, self._records = self._records, []
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
        self.flush(sync=True)
        with self._io:
            self._rotate()
            sealed = list(self._sealed)
            with self._lock:
                keep = Keep(set(self._live), set(self._ended), set(self._leaning))
        compacted = rewrite(sealed, keep)
        with self._io:
            self._sealed = [compacted, *self._sealed[len(sealed) :]]
            self._compacted_bytes = compacted.size
            self._counts["compactions"] += 1

    def close(self) -> None:
        """Writes the rest and lets another process open the folder. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._flusher is not None:
            self._flusher.join()
        try:
            self.flush()
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

    def _about(self, session: str, kind: Kind, payload: bytes) -> None:
        with self._appending():
            if (slot := self._lanes.slot(session)) is not None:
                self._append(kind, ints("I", slot), payload)

    def _append(self, kind: Kind, *payload: bytes) -> None:
        """Queues a record; the caller holds the lock."""
        self._raise_failure()
        self._records.append(record(kind, *payload))

    @contextmanager
    def _appending(self) -> Iterator[None]:
        """Holds the lock while records are queued; without a flush interval they are written at once."""
        with self._lock:
            yield
        if self._flush_s == 0:
            self.flush(sync=False)

    def _write(self, records: Sequence[Unsealed], *, sync: bool) -> None:
        """Adds the checksums, writes and rotates; the caller holds the write lock."""
        buffers = [buffer for record in records for buffer in record.seal()]
        try:
            written = _write_all(self._file.fileno(), buffers)
            self._size += written
            self._counts["bytes"] += written
            self._counts["flushes"] += bool(records)
            if sync:
                os.fsync(self._file.fileno())
            if self._size >= self._segment_bytes:
                self._rotate()
        except OSError as error:
            self._failure = error
            self._raise_failure()

    def _rotate(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        number = int(Path(self._file.name).stem)
        self._sealed.append(Segment(Path(self._file.name), number, number))
        self._file, self._size = self._new_segment()

    def _new_segment(self) -> tuple[IO[bytes], int]:
        number = next_number(self._folder)
        file = segment_path(self._folder, number).open("xb", buffering=0)
        head = header(number, number)
        file.write(head)
        sync_folder(self._folder)
        return file, len(head)

    def _sealed_bytes(self) -> int:
        return sum(segment.size for segment in list(self._sealed))

    def _flush_forever(self) -> None:
        while not self._closing.wait(self._flush_s):
            try:
                self.flush()
            except TokenLogError:
                return  # kept in `_failure`: the next append raises it

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TokenLogError(
                f"the token log in {self._folder} cannot be written ({self._failure}): free space or make "
                "the folder writable, then resume the run; what was flushed before is safe"
            ) from self._failure


def _write_all(file: int, buffers: Sequence[Buffer]) -> int:
    """Writes buffers one after the other, without joining them; returns their bytes."""
    total = 0
    for first in range(0, len(buffers), _BUFFERS):
        some = list(buffers[first : first + _BUFFERS])
        size = sum(map(len, some))
        done = os.writev(file, some)
        if done < size:  # a disk that is nearly full, or a signal
            rest = memoryview(b"".join(some))[done:]
            while rest:
                rest = rest[os.write(file, rest) :]
        total += size
    return total


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
