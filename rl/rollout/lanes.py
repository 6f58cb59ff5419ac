"""Where the tokens of a decode step go in the log: who runs, and at which place of a turn each one is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from rl.engines.base import StepFrame
from rl.rollout.extras import Extras
from rl.rollout.frames import Unsealed
from rl.rollout.recorded import kept_of
from rl.rollout.steps import step_record


class Lanes:
    """The running sessions, each with its sample's slot and the place of its next token. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._free: list[int] = []
        self._slot = np.zeros(0, np.uint32)
        self._place = np.zeros(0, np.uint32)
        self._route: _Route | None = None
        self._turns: dict[str, dict[int, int]] = {}

    def open(self, session: str, slot: int, place: int = 0, turns: Mapping[int, int] | None = None) -> None:
        """A session begins; `turns` has the tokens of turns that are in the log already."""
        assert session not in self._of, f"{session} is running already"
        if not self._free:
            grown = max(64, 2 * len(self._slot))
            self._free = list(range(grown - 1, len(self._slot) - 1, -1))
            self._slot, self._place = np.resize(self._slot, grown), np.resize(self._place, grown)
        lane = self._free.pop()
        self._slot[lane], self._place[lane] = slot, place
        self._of[session], self._route, self._turns[session] = lane, None, dict(turns or {})

    def slot(self, session: str) -> int | None:
        """The slot of a session; None for one that is not logged."""
        lane = self._of.get(session)
        return None if lane is None else int(self._slot[lane])

    def begin_turn(self, session: str) -> None:
        """The next token of a session is its turn's first."""
        self._place[self._of[session]] = 0

    def end_turn(self, session: str, turn: int, tokens: int) -> None:
        """A turn ended; it counts as logged when all of its `tokens` are."""
        if int(self._place[self._of[session]]) == tokens:
            self._turns[session][turn] = tokens

    def logged_turns(self, session: str) -> dict[int, int]:
        """Tokens of a session's turns that are wholly in the log."""
        return self._turns.get(session, {})

    def close(self, session: str) -> int | None:
        """A session ends; returns its slot."""
        self._turns.pop(session, None)
        lane, self._route = self._of.pop(session, None), None
        if lane is None:
            return None
        self._free.append(lane)
        return int(self._slot[lane])

    def step(self, frame: StepFrame) -> tuple[Unsealed | None, int]:
        """The record of a decode step, and how many of its tokens are logged; their places move on."""
        route = self._route
        if route is None or route.sessions != frame.sessions or route.turns != frame.turns:
            route = self._route = self._new_route(frame)
        count = len(route.lanes)
        if not count:
            return None, 0
        columns = route.columns.copy()
        columns[2] = self._place[route.lanes]
        if route.repeats is None:
            self._place[route.lanes] += 1
        else:
            columns[2] += route.repeats
            np.add.at(self._place, route.lanes, 1)
        columns[3].view(np.int32)[:] = frame.token_ids[route.known]
        columns[4].view(np.float32)[:] = frame.logprobs[route.known]
        extras = _extras(frame) if route.whole else _extras(frame).take(route.found)
        return step_record(frame.policy_version, columns, extras), count

    def _new_route(self, frame: StepFrame) -> _Route:
        lanes = np.fromiter(map(self._of.get, frame.sessions, repeat(-1)), np.int64, len(frame.sessions))
        found = np.flatnonzero(lanes >= 0)
        whole = len(found) == len(lanes)
        lanes = lanes[found]
        columns = np.zeros((5, len(lanes)), np.uint32)
        columns[0] = self._slot[lanes]
        columns[1] = np.fromiter(frame.turns, np.uint32, len(frame.turns))[found]
        several = bool(len(lanes)) and int(np.bincount(lanes).max()) > 1
        repeats = _repeats(lanes) if several else None
        return _Route(list(frame.sessions), list(frame.turns), whole, found, lanes, columns, repeats)


@dataclass(frozen=True, slots=True)
class _Route:
    """Which entries of a frame are logged and where; most steps have the sessions of the step before.

    `found` are the frame's logged entries (`whole`: all of them), `columns` uint32 [5, n] has their slots and
    turns, `repeats` counts earlier entries of the same session (several tokens of one turn in a step).
    """

    sessions: Sequence[str]
    turns: Sequence[int]
    whole: bool
    found: np.ndarray
    lanes: np.ndarray
    columns: np.ndarray
    repeats: np.ndarray | None

    @property
    def known(self) -> np.ndarray | slice:
        """An index of the logged entries."""
        return slice(None) if self.whole else self.found


def _extras(frame: StepFrame) -> Extras:
    return Extras(frame.states, frame.expert_ids, kept_of(frame.sampling_mask), frame.selections)


def _repeats(lanes: np.ndarray) -> np.ndarray:
    """For each entry, how many earlier entries are the same lane."""
    order = np.argsort(lanes, kind="stable")
    ordered = lanes[order]
    ranks = np.empty(len(lanes), np.uint32)
    ranks[order] = np.arange(len(lanes)) - np.searchsorted(ordered, ordered, "left")
    return ranks
