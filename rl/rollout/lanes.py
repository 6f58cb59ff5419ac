"""Where the tokens of a decode step go in the log: who runs, and at which place of a turn each one is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, repeat
from operator import ne
from typing import NamedTuple, TypeVar

import numpy as np

from rl.engines.base import StepFrame
from rl.rollout.extras import Extras
from rl.rollout.frames import Sealed
from rl.rollout.recorded import kept_of
from rl.rollout.steps import F4, I4, plain, step_record

T = TypeVar("T")
_MASK = 0xFFFFFFFF
_PIECE = 64
_FEW = 64
"""Up to so many changed entries of a route are renewed one by one."""


class PendingStep(NamedTuple):
    """The `count` tokens of a decode step that are logged, before anyone made a record of them.

    `owners` uint32 [2, count] are slots and turns, `began` uint32 [count] plus `moved` (modulo 2**32) the
    places; `found` are the frame's entries (None: all).
    """

    frame: StepFrame
    owners: np.ndarray
    began: np.ndarray
    moved: int
    found: np.ndarray | None
    count: int

    def record(self) -> Sealed:
        """The step's record."""
        frame, owners, began, moved, found, _ = self
        ids, logprobs = frame.token_ids, frame.logprobs
        extras = Extras(frame.states, frame.expert_ids, kept_of(frame.sampling_mask), frame.selections)
        if found is not None:
            ids, logprobs, extras = ids[found], logprobs[found], extras.take(found)
        columns = owners, began + moved, plain(ids, I4), plain(logprobs, F4)
        return step_record(frame.policy_version, columns, extras)


class Lanes:
    """The running sessions, each with its sample's slot and the place of its next token. Not thread-safe.

    While the same sessions run, the places of their next tokens are `_began` plus `_moved`, in the order of
    the route; `_at` says where in it a lane is (-1: nowhere). A lane that is closed is given to another
    session only after the route was looked at again. Arrays that a step was given are never written to.
    """

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._free: list[int] = []
        self._retired: list[int] = []
        self._slot = np.zeros(0, np.uint32)
        self._place = np.zeros(0, np.uint32)
        self._at = np.zeros(0, np.int64)
        self._slot_of, self._place_of, self._at_of = self._slot.data, self._place.data, self._at.data
        self._route: _Route | None = None
        self._began: np.ndarray | None = None
        self._moved = 0
        self._turns: dict[str, dict[int, int]] = {}
        self._slots: dict[str, int] = {}

    def open(self, session: str, slot: int, place: int = 0, turns: Mapping[int, int] | None = None) -> None:
        """A session begins; `turns` has the tokens of turns that are in the log already."""
        assert session not in self._of, f"{session} is running already"
        if not self._free:
            self._grow(max(64, 2 * len(self._slot)))
        lane = self._free.pop()
        self._slot_of[lane], self._place_of[lane] = slot, place
        self._of[session], self._slots[session], self._turns[session] = lane, slot, dict(turns or {})
        if self._route is not None and not self._route.whole:
            self._settle()

    def slot(self, session: str) -> int | None:
        """The slot of a session; None for one that is not logged."""
        return self._slots.get(session)

    def begin_turn(self, session: str) -> None:
        """The next token of a session is its turn's first."""
        lane = self._of[session]
        self._place_of[lane] = 0
        if self._began is not None and (at := self._at_of[lane]) >= 0:
            self._began = self._began.copy()
            self._began[at] = -self._moved & _MASK

    def end_turn(self, session: str, turn: int, tokens: int) -> None:
        """A turn ended; it counts as logged when all of its `tokens` are."""
        lane = self._of[session]
        if self._began is not None and (at := self._at_of[lane]) >= 0:
            place = self._began.item(at) + self._moved & _MASK
        else:
            place = self._place_of[lane]
        if place == tokens:
            self._turns[session][turn] = tokens

    def logged_turns(self, session: str) -> dict[int, int]:
        """Tokens of a session's turns that are wholly in the log."""
        return self._turns.get(session, {})

    def close(self, session: str) -> int | None:
        """A session ends; returns its slot."""
        self._turns.pop(session, None)
        slot = self._slots.pop(session, None)
        if slot is not None:
            self._retired.append(self._of.pop(session))
        return slot

    def step(self, frame: StepFrame) -> PendingStep | None:
        """The tokens of a decode step that are logged, or None; their places move on."""
        route = self._route_of(frame)
        count = len(route.lanes)
        if not count:
            return None
        found = None if route.whole else route.found
        if self._began is not None:
            moved, self._moved = self._moved, self._moved + 1 & _MASK
            return PendingStep(frame, route.owners, self._began, moved, found, count)
        places = self._place[route.lanes]
        if route.repeats is not None:
            places = places + route.repeats
        np.add.at(self._place, route.lanes, 1)
        return PendingStep(frame, route.owners, places, 0, found, count)

    def _settle(self) -> None:
        """Writes down the places that moved on with the last steps, and forgets the route."""
        if self._began is not None and self._route is not None:
            self._place[self._route.lanes] = self._began + np.uint32(self._moved)
            self._at[self._route.lanes] = -1
        self._route = self._began = None

    def _route_of(self, frame: StepFrame) -> _Route:
        """Most steps have the sessions of the step before, or all but a few of them."""
        route = self._route
        if (
            route is None
            or self._retired
            or route.sessions is not frame.sessions
            or route.turns is not frame.turns
        ):
            if route is None or not self._patch(route, frame):
                self._settle()
                route = self._new_route(frame)
            self._free += self._retired
            self._retired.clear()
        return route

    def _new_route(self, frame: StepFrame) -> _Route:
        lanes = np.fromiter(map(self._of.get, frame.sessions, repeat(-1)), np.int64, len(frame.sessions))
        found = np.flatnonzero(lanes >= 0)
        whole = len(found) == len(lanes)
        lanes = lanes[found]
        turns = np.fromiter(frame.turns, np.uint32, len(frame.turns))[found]
        repeats = _repeats(lanes) if _has_twins(lanes) else None
        owners = np.stack([self._slot[lanes], turns])
        self._route = _Route(
            frame.sessions, frame.turns, list(frame.sessions), list(frame.turns), whole, found, lanes, owners,
            repeats,
        )  # fmt: skip
        if repeats is None:
            self._began, self._moved, self._at[lanes] = self._place[lanes], 0, np.arange(len(lanes))
        return self._route

    def _patch(self, route: _Route, frame: StepFrame) -> bool:
        """Renews the few entries of the route that changed; False where more than that is to be done."""
        if not route.whole or self._began is None or len(frame.sessions) != len(route.sessions):
            return False
        free = [at for lane in self._retired if (at := self._at_of[lane]) >= 0]
        changed = {
            *free,
            *_differences(route.sessions_then, frame.sessions, free),
            *_differences(route.turns_then, frame.turns, free),
        }
        if len(changed) > _FEW:
            return False
        lanes = [self._of.get(frame.sessions[number], -1) for number in changed]
        if -1 in lanes or len(set(lanes)) < len(lanes):
            return False
        if any((at := self._at_of[lane]) >= 0 and at not in changed for lane in lanes):
            return False  # a session that is there twice now
        if changed:
            self._renew(route, frame.turns, list(changed), lanes)
        route.sessions, route.turns = frame.sessions, frame.turns
        return True

    def _renew(self, route: _Route, turns: Sequence[int], numbers: list[int], lanes: list[int]) -> None:
        """Gives the entries `numbers` of a route to other lanes, one by one, as they are few."""
        assert self._began is not None
        began, owners, moved = self._began.copy(), route.owners.copy(), self._moved
        for number in numbers:
            old = route.lanes.item(number)
            self._place_of[old], self._at_of[old] = began.item(number) + moved & _MASK, -1
        for number, lane in zip(numbers, lanes, strict=True):
            route.lanes[number], self._at_of[lane] = lane, number
            began[number] = self._place_of[lane] - moved & _MASK
            owners[0, number], owners[1, number] = self._slot_of[lane], turns[number]
        self._began, route.owners = began, owners

    def _grow(self, size: int) -> None:
        before = len(self._slot)
        self._free = list(range(size - 1, before - 1, -1))
        self._slot, self._place = np.resize(self._slot, size), np.resize(self._place, size)
        self._at = np.concatenate([self._at, np.full(size - before, -1)])
        self._slot_of, self._place_of, self._at_of = self._slot.data, self._place.data, self._at.data


@dataclass(slots=True)
class _Route:
    """Which entries of a frame are logged and where.

    `found` are the frame's logged entries (`whole`: all of them), `owners` uint32 [2, n] has their slots and
    turns, `repeats` counts earlier entries of the same session (several tokens of one turn in a step). The
    lists `sessions_then` and `turns_then` are copies, which are brought to what a later frame has.
    """

    sessions: Sequence[str]
    turns: Sequence[int]
    sessions_then: list[str]
    turns_then: list[int]
    whole: bool
    found: np.ndarray
    lanes: np.ndarray
    owners: np.ndarray
    repeats: np.ndarray | None


def _differences(then: list[T], now: Sequence[T], known: list[int]) -> list[int]:
    """Where two sequences of the same length differ beside `known`: mostly nowhere, else in few pieces.

    `then` becomes equal to `now`. As both have the same objects, none of them is looked at.
    """
    for number in known:
        then[number] = now[number]
    if then == now:
        return []
    found: list[int] = []
    for first in range(0, len(then), _PIECE):
        some, others = then[first : first + _PIECE], now[first : first + _PIECE]
        if some != others:
            found += compress(count(first), map(ne, some, others))
    then[:] = now
    return found


def _has_twins(lanes: np.ndarray) -> bool:
    return bool(len(lanes)) and int(np.bincount(lanes).max()) > 1


def _repeats(lanes: np.ndarray) -> np.ndarray:
    """For each entry, how many earlier entries are the same lane."""
    order = np.argsort(lanes, kind="stable")
    ordered = lanes[order]
    ranks = np.empty(len(lanes), np.uint32)
    ranks[order] = np.arange(len(lanes)) - np.searchsorted(ordered, ordered, "left")
    return ranks
