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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from envs.types import FinishReason, Message, Trajectory, TrajectoryKey
from rl.engines.base import StepFrame
from rl.rollout import codec
from rl.rollout.assignment import Assignment
from rl.rollout.frames import Damage, Kind, StepWriter, header, ints, record
from rl.rollout.segments import Segment, list_segments, next_number, rewrite, segment_path, sync_folder
from rl.rollout.state import FINISHES, LoggedSample, Recovery, SandboxPlace, rebuild


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
        self._chunks: list[bytes] = []
        self._lanes: dict[str, int] = {}
        self._free: list[int] = []
        self._lane_slot = np.zeros(0, np.uint32)
        self._lane_position = np.zeros(0, np.uint32)
        self._route: _Route | None = None
        self._slots: dict[TrajectoryKey, int] = {}
        self._live: set[int] = set()
        self._ended: set[int] = set()
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
            self._open_lane(assignment.session, slot)
            self._append(Kind.START, ints("I", slot) + body)

    def resume(self, sample: LoggedSample) -> None:
        """A recovered sample goes on after exactly what `sample` holds; whatever else was logged is void."""
        turn = max(len(sample.turns) - 1, 0)
        last = sample.turns[-1] if sample.turns else None
        tokens, results = (len(last.tokens), len(last.results)) if last else (0, 0)
        with self._appending():
            slot = self._slots[sample.assignment.key]
            self._open_lane(sample.assignment.session, slot, tokens)
            closed = int(last is not None and last.finish is not None)
            self._append(Kind.RESET, ints("IIIIII", slot, len(sample.turns), turn, tokens, closed, results))

    def begin(self, session: str, turn: int, prompt_ids: Sequence[int], *, new_branch: bool) -> None:
        """A turn is about to be sampled after `prompt_ids`, its new tokens."""
        ids = np.asarray(prompt_ids, "<i4").tobytes()
        with self._appending():
            if (lane := self._lanes.get(session)) is not None:
                self._lane_position[lane] = 0
                slot = int(self._lane_slot[lane])
                self._append(Kind.BEGIN, ints("III", slot, turn, int(new_branch)) + ids)

    def turn(self, session: str, turn: int, tokens: int, finish: FinishReason) -> None:
        """A turn was sampled to its end; it has `tokens` tokens."""
        self._about(session, Kind.TURN, ints("III", turn, tokens, FINISHES.index(finish)))

    def result(self, session: str, turn: int, number: int, message: Message) -> None:
        """The result of the turn's tool call `number` (0-based)."""
        body = json.dumps(codec.message_to_json(message)).encode()
        self._about(session, Kind.RESULT, ints("II", turn, number) + body)

    def place(self, session: str, place: SandboxPlace) -> None:
        """Where the sample's own sandbox stands now; the last such record counts."""
        self._about(session, Kind.PLACE, json.dumps(asdict(place)).encode())

    def end(self, session: str, trajectory: Trajectory) -> None:
        """A sample ended; its whole result is kept until it is consumed."""
        body = json.dumps(codec.trajectory_to_json(trajectory)).encode()
        with self._appending():
            lane, self._route = self._lanes.pop(session, None), None
            if lane is not None:
                self._free.append(lane)
                slot = int(self._lane_slot[lane])
                self._live.discard(slot)
                self._ended.add(slot)
                self._append(Kind.END, ints("I", slot) + body)

    def consumed(self, keys: Iterable[TrajectoryKey]) -> None:
        """These samples will never be asked for again; keys that the log does not know are ignored."""
        with self._appending():
            slots = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
            self._live.difference_update(slots)
            self._ended.difference_update(slots)
            if slots:
                self._append(Kind.CONSUMED, np.array(slots, "<u4").tobytes())

    # What happens within a turn: called by the engine's thread.

    def on_step(self, frame: StepFrame) -> None:
        """Appends the tokens of one decode step; the engine's step listener."""
        with self._appending():
            route = self._route
            if route is None or route.sessions != frame.sessions or route.turns != frame.turns:
                route = self._route = _Route.of(frame, self._lanes, self._lane_slot)
            lanes, rows = route.lanes, route.writer.rows
            if lanes.size == 0:
                return
            rows["index"] = self._lane_position[lanes]
            if route.repeats is None:
                self._lane_position[lanes] += 1
            else:
                rows["index"] += route.repeats
                np.add.at(self._lane_position, lanes, 1)
            rows["token"] = frame.token_ids[route.known]
            rows["logprob"] = frame.logprobs[route.known]
            self._counts["tokens"] += lanes.size
            self._counts["frames"] += 1
            self._raise_failure()
            self._chunks.append(route.writer.record(frame.policy_version))

    # Writing it out.

    def flush(self, *, sync: bool | None = None) -> None:
        """Writes everything appended so far; with `sync` (default: as configured) also waits for the disk.

        Raises:
            TokenLogError: The file cannot be written; the log stays unusable.
        """
        with self._io:
            with self._lock:
                self._raise_failure()
                chunks, self._chunks = self._chunks, []
            self._write(b"".join(chunks), sync=self._fsync if sync is None else sync)

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
                live, ended = set(self._live), set(self._ended)
        compacted = rewrite(sealed, live, ended)
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

    def _open_lane(self, session: str, slot: int, position: int = 0) -> None:
        assert session not in self._lanes, f"{session} is running already"
        if not self._free:
            grown = max(64, 2 * len(self._lane_slot))
            self._free = list(range(grown - 1, len(self._lane_slot) - 1, -1))
            self._lane_slot = np.resize(self._lane_slot, grown)
            self._lane_position = np.resize(self._lane_position, grown)
        lane = self._free.pop()
        self._lane_slot[lane], self._lane_position[lane] = slot, position
        self._route = None
        self._lanes[session] = lane

    def _about(self, session: str, kind: Kind, payload: bytes) -> None:
        with self._appending():
            if (lane := self._lanes.get(session)) is not None:
                self._append(kind, ints("I", int(self._lane_slot[lane])) + payload)

    def _append(self, kind: Kind, payload: bytes) -> None:
        """Queues a record; the caller holds the lock."""
        self._raise_failure()
        self._chunks.append(record(kind, payload))

    @contextmanager
    def _appending(self) -> Iterator[None]:
        """Holds the lock while records are queued; without a flush interval they are written at once."""
        with self._lock:
            yield
        if self._flush_s == 0:
            self.flush(sync=False)

    def _write(self, data: bytes, *, sync: bool) -> None:
        """Writes and rotates; the caller holds the write lock."""
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._size += len(data)
            self._counts["bytes"] += len(data)
            self._counts["flushes"] += bool(data)
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


@dataclass(frozen=True, slots=True)
class _Route:
    """Which entries of a frame are logged and where; most steps have the sessions of the step before.

    `known` selects the frame's logged entries, `writer` has their rows with slots and turns filled in,
    `repeats` counts earlier entries of the same session (several tokens of one turn in a step), or is None.
    """

    sessions: Sequence[str]
    turns: Sequence[int]
    known: np.ndarray | slice
    lanes: np.ndarray
    writer: StepWriter
    repeats: np.ndarray | None

    @classmethod
    def of(cls, frame: StepFrame, table: Mapping[str, int], slots: np.ndarray) -> _Route:
        lanes = np.array([table.get(session, -1) for session in frame.sessions], np.int64)
        found = np.flatnonzero(lanes >= 0)
        lanes = lanes[found]
        writer = StepWriter.of(len(lanes))
        writer.rows["slot"] = slots[lanes]
        writer.rows["turn"] = np.asarray(frame.turns, np.uint32)[found]
        known = slice(None) if len(found) == len(frame.sessions) else found
        repeats = _repeats(lanes) if len(np.unique(lanes)) < len(lanes) else None
        return cls(list(frame.sessions), list(frame.turns), known, lanes, writer, repeats)


def _repeats(lanes: np.ndarray) -> np.ndarray:
    """For each entry, how many earlier entries are the same lane."""
    order = np.argsort(lanes, kind="stable")
    ordered = lanes[order]
    ranks = np.empty(len(lanes), np.uint32)
    ranks[order] = np.arange(len(lanes)) - np.searchsorted(ordered, ordered, "left")
    return ranks


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
