"""What a token log says of samples that no checkpoint has: those that finished, and those to go on with.

Records may be missing where the log was damaged. Each token carries its place, so a hole is seen: what lies
behind it in that sample is not used, and the sample goes on from there. Reading a log changes nothing but a
torn tail, which is cut off; reading it again gives the same.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from envs.types import FinishReason, Message, Trajectory
from rl.engines.base import Completion
from rl.rollout import codec
from rl.rollout.assignment import Assignment
from rl.rollout.frames import ITEM, ROW, Damage, Kind, Record, Scan, scan, slots_of, step_columns
from rl.rollout.segments import Segment

FINISHES = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Sampled tokens as columns: token_ids int32 [n], logprobs float32 [n], versions int32 [n]."""

    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.token_ids[part], self.logprobs[part], self.versions[part])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__slots__
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """A turn as logged. `finish` is None while it was sampled; `results` are those of its tool calls."""

    prompt_ids: tuple[int, ...]
    new_branch: bool
    tokens: Tokens
    finish: FinishReason | None = None
    results: tuple[Message, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of its tokens."""
        return tuple(self.tokens.token_ids.tolist())

    @property
    def completion(self) -> Completion:
        """Its tokens as the engine takes them back."""
        columns = (self.tokens.logprobs.tolist(), self.tokens.versions.tolist())
        finish = self.finish or FinishReason.ABORT
        return Completion(self.token_ids, tuple(columns[0]), tuple(columns[1]), finish)


@dataclass(frozen=True, slots=True)
class SandboxPlace:
    """Where a sample's own sandbox stands: its id, its generation, and how many commands it was given."""

    sandbox: str
    generation: int
    position: int


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """An unfinished sample: what it was told and how far it came, in tokens and in its own sandbox."""

    assignment: Assignment
    turns: tuple[LoggedTurn, ...]
    place: SandboxPlace | None = None

    def up_to_version(self, version: int) -> LoggedSample:
        """The sample, with tokens of policies newer than `version` counted as of `version`.

        After a resume from an older checkpoint the newer weights are lost, but not what they sampled: the
        tokens' log-probabilities stay those of the policy that sampled them, which is what a loss needs.
        """
        turns = (
            replace(turn, tokens=replace(turn.tokens, versions=np.minimum(turn.tokens.versions, version)))
            for turn in self.turns
        )
        return replace(self, turns=tuple(turns))


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a log holds, by slot; `lost_tokens` are logged tokens that lie behind a hole or have no sample."""

    unfinished: dict[int, LoggedSample]
    finished: dict[int, Trajectory]
    damage: Damage
    tokens: int = 0
    lost_tokens: int = 0
    next_slot: int = 0


@dataclass(slots=True)
class _Turn:
    prompt_ids: tuple[int, ...]
    new_branch: bool
    tokens: int | None = None
    finish: FinishReason | None = None
    results: dict[int, Message] = field(default_factory=dict)


@dataclass(slots=True)
class _Reset:
    """Rows before `row` (of the whole log) at or behind (turn, tokens) are void."""

    row: int
    turn: int
    tokens: int


@dataclass(slots=True)
class _Slot:
    start: bytes | None = None
    end: bytes | None = None
    place: bytes = b""
    turns: dict[int, _Turn] = field(default_factory=dict)
    resets: list[_Reset] = field(default_factory=list)


@dataclass(slots=True)
class _Reader:
    slots: defaultdict[int, _Slot] = field(default_factory=lambda: defaultdict(_Slot))
    consumed: set[int] = field(default_factory=set)
    rows: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    row_count: int = 0
    top: int = -1

    def read(self, data: bytes, found: Scan) -> None:
        rows, versions, counts = step_columns(data, found)
        self.rows.append(rows)
        self.versions.append(versions)
        before = self.row_count + np.concatenate([[0], np.cumsum(counts)])
        for item in found.others:
            self.row_count = int(before[item.steps_before])
            self._read_other(data, item)
        self.row_count = int(before[-1])

    def _read_other(self, data: bytes, item: Record) -> None:
        kind, start, end = item.kind, item.start, item.end
        slots = list(slots_of(data, item))
        self.top = max([self.top, *slots])
        if kind == Kind.CONSUMED:
            self.consumed.update(slots)
            return
        slot = self.slots[slots[0]]
        payload = data[start + 4 : end]
        if kind == Kind.START:
            slot.start = payload
        elif kind == Kind.END:
            slot.end = payload
        elif kind == Kind.PLACE:
            slot.place = payload
        elif kind == Kind.RESET:
            self._reset(slot, *struct.unpack("<IIIII", payload))
        else:
            _read_turn(slot, Kind(kind), payload, self.row_count)

    def _reset(self, slot: _Slot, turns: int, turn: int, tokens: int, closed: int, results: int) -> None:
        slot.resets.append(_Reset(self.row_count, turn if turns else 0, tokens))
        slot.turns = {number: item for number, item in slot.turns.items() if number < turns}
        if (last := slot.turns.get(turn)) is not None:
            last.results = {number: item for number, item in last.results.items() if number < results}
            if not closed:
                last.tokens = last.finish = None


def _read_turn(slot: _Slot, kind: Kind, payload: bytes, row: int) -> None:
    if kind is Kind.BEGIN:
        turn, new_branch = struct.unpack_from("<II", payload)
        ids = tuple(np.frombuffer(payload, "<i4", offset=8).tolist())
        if any(number >= turn for number in slot.turns):  # sampled anew: what was there is void
            slot.resets.append(_Reset(row, turn, 0))
            slot.turns = {number: item for number, item in slot.turns.items() if number < turn}
        slot.turns[turn] = _Turn(ids, bool(new_branch))
    elif kind is Kind.TURN:
        turn, tokens, finish = struct.unpack("<III", payload)
        if turn in slot.turns:
            slot.turns[turn].tokens, slot.turns[turn].finish = tokens, FINISHES[finish]
    elif kind is Kind.RESULT:
        turn, number = struct.unpack_from("<II", payload)
        if turn in slot.turns:
            slot.turns[turn].results[number] = codec.message_from_json(json.loads(payload[8:]))


def rebuild(segments: list[Segment], damage: Damage) -> Recovery:
    """Reads the segments in order and returns what they hold; cuts a torn tail off its file."""
    reader = _Reader()
    for segment in segments:
        data = segment.path.read_bytes()
        torn = damage.torn_bytes
        found = scan(data, damage)
        reader.read(data, found)
        if damage.torn_bytes > torn:
            with segment.path.open("r+b") as file:
                file.truncate(found.end)
    return _recover(reader, damage)


def _recover(reader: _Reader, damage: Damage) -> Recovery:
    over = reader.consumed | {number for number, slot in reader.slots.items() if slot.end is not None}
    columns = _Columns.of(reader, over)
    unfinished: dict[int, LoggedSample] = {}
    finished: dict[int, Trajectory] = {}
    lost = columns.count - sum(len(columns.rows_of(number)[0]) for number in set(reader.slots) - over)
    for number, slot in sorted(reader.slots.items()):
        if number in reader.consumed:
            continue
        if slot.end is not None:
            finished[number] = codec.trajectory_from_json(json.loads(slot.end))
            continue
        rows, versions = columns.after_resets(number, slot.resets)
        lost += len(rows)
        if slot.start is not None:
            turns = tuple(_turns(slot, rows, versions))
            lost -= sum(len(turn.tokens) for turn in turns)
            assignment = codec.assignment_from_json(json.loads(slot.start))
            place = SandboxPlace(**json.loads(slot.place)) if slot.place else None
            unfinished[number] = LoggedSample(assignment, turns, place)
    top = max(reader.top, columns.top)
    return Recovery(unfinished, finished, damage, reader.row_count, lost, top + 1)


def _turns(slot: _Slot, rows: np.ndarray, versions: np.ndarray) -> Iterator[LoggedTurn]:
    """The turns of a sample up to the first hole; `rows` are sorted by turn and place."""
    for expected in range(len(slot.turns)):
        turn = slot.turns.get(expected)
        if turn is None:
            return
        low, high = np.searchsorted(rows["turn"], [expected, expected + 1])
        found = int(np.argmin(np.append(rows["index"][low:high] == np.arange(high - low), False)))
        whole = turn.tokens is not None and found >= turn.tokens
        part = slice(low, low + (turn.tokens if whole and turn.tokens is not None else found))
        yield LoggedTurn(
            turn.prompt_ids,
            turn.new_branch,
            Tokens(rows["token"][part].copy(), rows["logprob"][part].copy(), versions[part].copy()),
            turn.finish if whole else None,
            tuple(_unbroken(turn.results)) if whole else (),
        )
        if not whole:
            return


def _unbroken(results: dict[int, Message]) -> Iterator[Message]:
    for number in range(len(results)):
        if number not in results:
            return
        yield results[number]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The rows of unfinished samples by slot, within a slot as logged; `age` is their order in the log."""

    rows: np.ndarray
    slots: np.ndarray
    versions: np.ndarray
    age: np.ndarray
    top: int

    @classmethod
    def of(cls, reader: _Reader, over: set[int]) -> _Columns:
        rows = np.concatenate([np.zeros(0, ITEM), *reader.rows])
        versions = np.concatenate([np.zeros(0, np.int32), *reader.versions])
        slots = rows.view(ROW)["slot"].copy()
        top = int(slots.max()) if len(rows) else -1
        order = _by_slot(slots)
        if over:
            order = order[~np.isin(slots[order], np.array(sorted(over), np.uint32))]
        return cls(rows[order].view(ROW), slots[order], versions[order], order, top)

    @property
    def count(self) -> int:
        return len(self.rows)

    def rows_of(self, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of one slot with their versions and ages."""
        low, high = np.searchsorted(self.slots, np.array([slot, slot + 1], np.uint32))
        return self.rows[low:high], self.versions[low:high], self.age[low:high]

    def after_resets(self, slot: int, resets: list[_Reset]) -> tuple[np.ndarray, np.ndarray]:
        """The rows of one slot that are not void, sorted by turn and place, and their versions."""
        rows, versions, age = self.rows_of(slot)
        keep = np.ones(len(rows), bool)
        for reset in resets:
            behind = (rows["turn"] > reset.turn) | (
                (rows["turn"] == reset.turn) & (rows["index"] >= reset.tokens)
            )
            keep &= ~(behind & (age < reset.row))
        rows, versions = rows[keep], versions[keep]
        places = (rows["turn"].astype(np.int64) << 32) | rows["index"]
        again = np.flatnonzero(np.diff(places) <= 0)
        if again.size:  # sampled anew, and the record that says so is lost: which rows count is not known
            certain = rows["turn"] < rows["turn"][again + 1].min()
            rows, versions = rows[certain], versions[certain]
        return rows, versions


def _by_slot(slots: np.ndarray) -> np.ndarray:
    """A stable order by slot (uint32 [n]): two passes of numpy's radix sort, which takes 16 bits."""
    order = np.argsort(slots.astype(np.uint16), kind="stable")
    if len(slots) and int(slots.max()) > 0xFFFF:
        order = order[np.argsort((slots[order] >> 16).astype(np.uint16), kind="stable")]
    return order
