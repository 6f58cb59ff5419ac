"""Reads a token log: from records, some of them lost, to the samples that they tell of.

Records may be missing where the log was damaged. Each token carries its place, so a hole is seen: what lies
behind it in that sample is not used, and the sample goes on from there. Reading a log changes nothing but a
torn tail, which is cut off; reading it again gives the same.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from envs.types import FinishReason, Images, Message, Trajectory
from rl.rollout import codec
from rl.rollout.ends import with_choices, with_steps
from rl.rollout.frames import Damage, Data, Kind, Record, Scan, scan, slots_of
from rl.rollout.segments import Segment, map_file
from rl.rollout.state import FINISHES, LoggedSample, LoggedTurn, Recovery, SandboxPlace, Tokens
from rl.rollout.steps import Steps


@dataclass(slots=True)
class _Turn:
    prompt_ids: tuple[int, ...]
    new_branch: bool
    tokens: int | None = None
    finish: FinishReason | None = None
    results: dict[int, Message] = field(default_factory=dict)
    starts: tuple[tuple[int, int], ...] = ()
    images: Images | None = None


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
    steps: list[Steps] = field(default_factory=list)
    row_count: int = 0
    top: int = -1

    def read(self, data: Data, found: Scan) -> None:
        steps = Steps.read(data, found)
        self.steps.append(steps)
        before = self.row_count + np.concatenate([[0], np.cumsum(steps.counts)])
        for item in found.others:
            self.row_count = int(before[item.steps_before])
            self._read_other(data, item, found.format)
        self.row_count = int(before[-1])

    def _read_other(self, data: Data, item: Record, form: int) -> None:
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
            slot.end = payload if form > 1 else b"".join(codec.text_to_parts(payload))
        elif kind == Kind.PLACE:
            slot.place = payload
        elif kind == Kind.RESET:
            self._reset(slot, *struct.unpack("<IIIII", payload))
        else:
            _read_turn(slot, Kind(kind), payload, self.row_count)

    def _reset(self, slot: _Slot, turns: int, turn: int, tokens: int, closed: int, results: int) -> None:
        slot.end = None
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
        turn, tokens, finish = struct.unpack_from("<III", payload)
        if turn in slot.turns:
            slot.turns[turn].tokens, slot.turns[turn].finish = tokens, FINISHES[finish]
            slot.turns[turn].starts = _pairs(payload[12:])
    elif kind is Kind.STARTS:
        (turn,) = struct.unpack_from("<I", payload)
        if turn in slot.turns:
            slot.turns[turn].starts = _pairs(payload[4:])
    elif kind is Kind.IMAGES:
        (turn,) = struct.unpack_from("<I", payload)
        if turn in slot.turns:
            slot.turns[turn].images = codec.images_from_bytes(payload[4:])
    elif kind is Kind.RESULT:
        turn, number = struct.unpack_from("<II", payload)
        if turn in slot.turns:
            slot.turns[turn].results[number] = codec.message_from_json(json.loads(payload[8:]))


def _pairs(payload: bytes) -> tuple[tuple[int, int], ...]:
    pairs = np.frombuffer(payload, "<u4").reshape(-1, 2).tolist()
    return tuple((encoder, decoder) for encoder, decoder in pairs)


def rebuild(segments: list[Segment], damage: Damage) -> Recovery:
    """Reads the segments in order and returns what they hold; cuts a torn tail off its file."""
    reader = _Reader()
    for segment in segments:
        data = map_file(segment)
        torn = damage.torn_bytes
        found = scan(data, segment.format, damage)
        reader.read(data, found)
        if damage.torn_bytes > torn:
            with segment.path.open("r+b") as file:
                file.truncate(found.end)
    return _recover(reader, damage)


def _recover(reader: _Reader, damage: Damage) -> Recovery:
    ends = {
        number: codec.trajectory_from_bytes(slot.end)
        for number, slot in sorted(reader.slots.items())
        if slot.end is not None and number not in reader.consumed
    }
    leaning = {number for number, (_, choices, dropped) in ends.items() if choices or dropped}
    over = reader.consumed | ends.keys() - leaning
    top = max([reader.top, *(int(part.slot.max()) for part in reader.steps if len(part))])
    columns = _Columns.of(reader.steps, over, top)
    finished: dict[int, Trajectory] = {}
    for number, (ended, choices, dropped) in ends.items():
        tokens_of = partial(columns.turn, number, reader.slots[number].resets)
        if (whole := with_steps(with_choices(ended, choices, tokens_of), dropped, tokens_of)) is not None:
            finished[number] = whole
    unfinished: dict[int, LoggedSample] = {}
    lost = len(columns) - sum(len(columns.of_slot(number)) for number in set(reader.slots) - over)
    for number, slot in sorted(reader.slots.items()):
        if number in reader.consumed or number in finished:
            continue
        placed = columns.after_resets(columns.of_slot(number), slot.resets)
        lost += len(placed[0])
        if slot.start is not None:
            turns = tuple(_turns(slot, columns, *placed))
            lost -= sum(len(turn.tokens) for turn in turns)
            assignment = codec.assignment_from_json(json.loads(slot.start))
            place = SandboxPlace(**json.loads(slot.place)) if slot.place else None
            unfinished[number] = LoggedSample(assignment, turns, place)
    return Recovery(unfinished, finished, damage, reader.row_count, lost, top + 1, leaning & finished.keys())


def _turns(
    slot: _Slot, columns: _Columns, rows: np.ndarray, numbers: np.ndarray, places: np.ndarray
) -> Iterator[LoggedTurn]:
    """The turns of a sample up to the first hole; `rows` are sorted by turn (`numbers`) and place."""
    for expected in range(len(slot.turns)):
        turn = slot.turns.get(expected)
        if turn is None:
            return
        low, high = np.searchsorted(numbers, np.array([expected, expected + 1], np.uint32)).tolist()
        found = int(np.argmin(np.append(places[low:high] == np.arange(high - low), False)))
        whole = turn.tokens is not None and found >= turn.tokens
        count = turn.tokens if whole and turn.tokens is not None else found
        yield LoggedTurn(
            turn.prompt_ids,
            turn.new_branch,
            columns.tokens(rows[low : low + count]),
            turn.finish if whole else None,
            tuple(_unbroken(turn.results)) if whole else (),
            turn.starts,
            turn.images,
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
    """The tokens of unfinished samples, as numbers of tokens of the log.

    `order` has them by slot, within a slot as logged; slot s is from `bounds[s]` to `bounds[s + 1]` of it.
    A segment's numbers start at its entry of `begins`.
    """

    steps: list[Steps]
    begins: np.ndarray
    order: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, steps: list[Steps], over: set[int], top: int) -> _Columns:
        gone = np.zeros(top + 1, bool)
        gone[sorted(over)] = True
        kept = [np.flatnonzero(~gone[part.slot]) for part in steps]
        begins = np.cumsum([0, *(len(part) for part in steps)])
        slot = np.concatenate(
            [np.zeros(0, np.uint32), *(part.slot[rows] for part, rows in zip(steps, kept, strict=True))]
        )
        numbers = np.concatenate(
            [
                np.zeros(0, np.int64),
                *(rows + begin for rows, begin in zip(kept, begins.tolist(), strict=False)),
            ]
        )
        counts = np.bincount(slot, minlength=top + 1)
        return cls(steps, begins, numbers[_by_slot(slot)], np.cumsum([0, *counts.tolist()]))

    def __len__(self) -> int:
        return len(self.order)

    def of_slot(self, slot: int) -> np.ndarray:
        """The numbers of one slot's tokens, as logged."""
        return self.order[self.bounds[slot] : self.bounds[slot + 1]]

    def column(self, name: str, rows: np.ndarray) -> np.ndarray:
        """A column of the log's steps, of these tokens."""
        parts = [getattr(self.steps[part], name)[at] for part, at in self._parts(rows)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint32), *parts])

    def _parts(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Runs of tokens that are in one segment, and their numbers there."""
        if not len(rows):
            return
        part = np.searchsorted(self.begins, rows[[0, -1]], "right") - 1
        if part[0] == part[1]:
            yield int(part[0]), rows - self.begins[part[0]]
            return
        parts = np.searchsorted(self.begins, rows, "right") - 1
        for low, high in pairwise([0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(rows)]):
            yield int(parts[low]), rows[low:high] - self.begins[parts[low]]

    def after_resets(
        self, rows: np.ndarray, resets: list[_Reset]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Those of a slot's tokens that are not void, sorted by turn and place; their turns and places."""
        turn, index = self.column("turn", rows), self.column("index", rows)
        if resets:
            keep = np.ones(len(rows), bool)
            for reset in resets:
                behind = (turn > reset.turn) | ((turn == reset.turn) & (index >= reset.tokens))
                keep &= ~(behind & (rows < reset.row))
            rows, turn, index = rows[keep], turn[keep], index[keep]
        places = (turn.astype(np.int64) << 32) | index
        again = np.flatnonzero(places[1:] <= places[:-1])
        if again.size:  # sampled anew, and the record that says so is lost: which tokens count is not known
            certain = turn < turn[again + 1].min()
            rows, turn, index = rows[certain], turn[certain], index[certain]
        return rows, turn, index

    def turn(self, slot: int, resets: list[_Reset], turn: int) -> Tokens:
        """The tokens of one turn of a slot up to the first hole."""
        rows, numbers, places = self.after_resets(self.of_slot(slot), resets)
        rows, places = rows[numbers == turn], places[numbers == turn]
        found = int(np.argmin(np.append(places == np.arange(len(places)), False)))
        return self.tokens(rows[:found])

    def tokens(self, rows: np.ndarray) -> Tokens:
        """Those of one turn, in order."""
        return Tokens.join([self._tokens_of(part, at) for part, at in self._parts(rows)])

    def _tokens_of(self, part: int, at: np.ndarray) -> Tokens:
        steps = self.steps[part]
        return Tokens(steps.token[at], steps.logprob[at], steps.versions(at), steps.extras(at))


def _by_slot(slots: np.ndarray) -> np.ndarray:
    """A stable order by slot (uint32 [n]): two passes of numpy's radix sort, which takes 16 bits."""
    order = np.argsort(slots.astype(np.uint16), kind="stable")
    if len(slots) and int(slots.max()) > 0xFFFF:
        order = order[np.argsort((slots[order] >> 16).astype(np.uint16), kind="stable")]
    return order
