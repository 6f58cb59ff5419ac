"""Who is served next: admission, sessions that keep their caches, shared prompts, and the prefill of a step.

Every row has a place for a sequence in the policy's cache. Requests are admitted in the order they came. A
row that is not served keeps the caches of its session until its place is needed: the session that was used
least recently goes first, and is computed anew when it comes back. Requests with the same history that are
admitted while it is being computed wait for it and get a fork of the cache.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from model.engine.requests import Pending
from model.engine.rows import NO_SLOT, Rows

# A call of the policy has a fixed cost, for small policies that of decoding about a hundred rows. Rows that
# need little prefill are therefore gathered for a few steps, unless they are a good part of all rows.
_GATHER_STEPS = 4


class Cache(Protocol):
    """What the scheduler asks of a policy's cache: places for sequences."""

    def allocate(self) -> int:
        """Returns a free, empty slot."""
        ...

    def fork(self, slot: int) -> int:
        """Returns a new slot with the same content."""
        ...

    def free(self, slot: int) -> None:
        """Gives a slot back."""
        ...


class Scheduler:
    """Rows, sessions and queues of an engine. `running` rows decode, `prefilling` rows are being computed."""

    def __init__(self, rows: Rows, cache: Cache, *, max_running: int) -> None:
        self.rows = rows
        self.max_running = max_running
        self.waiting: deque[Pending] = deque()
        self.running = np.zeros(0, np.int64)
        self.prefilling: list[int] = []
        self.evictions = 0
        self.forks = 0
        self._gathered = 0
        self._cache = cache
        self._free = list(range(rows.count - 1, -1, -1))
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._row_of: dict[int, int] = {}
        self._leaders: dict[bytes, int] = {}
        self._followers: dict[int, list[int]] = {}

    @property
    def served(self) -> int:
        """The number of requests that have a row."""
        return len(self._row_of)

    @property
    def idle_sessions(self) -> tuple[str, ...]:
        """Sessions that are not served and whose caches are kept, least recently used first."""
        return tuple(self._idle)

    def row_of(self, request_id: int) -> int | None:
        """Returns the row that serves a request, or None."""
        return self._row_of.get(request_id)

    def enqueue(self, pending: Pending) -> None:
        """Puts a request at the end of the queue and marks its session as used."""
        if pending.request.session in self._idle:
            self._idle.move_to_end(pending.request.session)
        self.waiting.append(pending)

    def admit(self) -> None:
        """Gives rows to waiting requests, in order, as long as fewer than `max_running` are served."""
        while self.waiting and self.served < self.max_running:
            pending = self.waiting.popleft()
            row = self._idle.pop(pending.request.session, None)
            if row is not None and not self.rows.matches(row, pending.history):
                self._drop(row)
                row = None
            if row is None:
                row = self._take_row()
                self._open_new(row, pending)
            else:
                self.rows.open(row, pending)
                self.prefilling.append(row)
            self._row_of[pending.request_id] = row

    def prefill_is_due(self, budget: int) -> bool:
        """Says whether this step is to prefill; at the latest every fourth step does, when a row needs it."""
        if not self.prefilling:
            return False
        self._gathered += 1
        stalled = self.served - self.running.size
        missing = (self.rows.length - self.rows.cached)[self.prefilling].sum()
        due = stalled * _GATHER_STEPS >= self.running.size or missing >= budget
        if due or self._gathered >= _GATHER_STEPS:
            self._gathered = 0
            return True
        return False

    def plan(self, budget: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Splits `budget` tokens of prefill over the rows: batches of (rows [b], tokens to compute [b]).

        The split is max-min fair. Rows with similar shares go together, so that little is padded.
        """
        rows = np.array(self.prefilling, np.int64)
        missing = self.rows.length[rows] - self.rows.cached[rows]
        order = np.argsort(missing, kind="stable")
        shares = _fair_shares(missing[order], budget)
        return [(rows[order[a:b]], shares[a:b]) for a, b in _similar(shares)]

    def computed(self, rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Records computed tokens; returns which rows, bool [b], are complete and may be sampled from."""
        self.rows.cached[rows] += shares
        return self.rows.cached[rows] == self.rows.length[rows]

    def start(self, row: int) -> list[int]:
        """Takes a complete row out of prefill; returns it with the rows that now share its caches."""
        self.prefilling.remove(row)
        followers = self._unlead(row)
        for follower in followers:
            self.rows.slot[follower] = self._cache.fork(int(self.rows.slot[row]))
            self.rows.cached[follower] = self.rows.cached[row]
            self.forks += 1
        return [row, *followers]

    def end(self, row: int, *, keep: bool) -> None:
        """Ends the service of a row; with `keep` its caches stay for the session's next turn."""
        del self._row_of[int(self.rows.request_id[row])]
        self.rows.request_id[row] = -1
        if row in self.prefilling:
            self.prefilling.remove(row)
            self._hand_over(row)
        elif self.rows.slot[row] == NO_SLOT:
            next(rows for rows in self._followers.values() if row in rows).remove(row)
        if keep and self.rows.slot[row] != NO_SLOT and self.rows.cached[row] > 0:
            self._idle[self.rows.session[row]] = row
        else:
            self._drop(row)

    def forget(self, session: str) -> None:
        """Frees the caches of an idle session."""
        if (row := self._idle.pop(session, None)) is not None:
            self._drop(row)

    def recompute(self, cache: Cache | None = None) -> None:
        """Empties all caches, or goes over to a new one.

        Idle sessions are forgotten, rows that are served are computed anew.
        """
        for session in self.idle_sessions:
            self.forget(session)
        self.prefilling += map(int, self.running)
        for row in self.prefilling:
            self._cache.free(int(self.rows.slot[row]))
        self._cache = self._cache if cache is None else cache
        for row in self.prefilling:
            self.rows.slot[row] = self._cache.allocate()
            self.rows.cached[row] = 0
        self.running = np.zeros(0, np.int64)

    def _open_new(self, row: int, pending: Pending) -> None:
        self.rows.open(row, pending)
        self.rows.cached[row] = 0
        leader = self._leaders.setdefault(pending.history.tobytes(), row)
        if leader == row:
            self._lead(row)
        else:
            self._followers.setdefault(leader, []).append(row)

    def _lead(self, row: int) -> None:
        self.rows.slot[row] = self._cache.allocate()
        self.prefilling.append(row)

    def _hand_over(self, row: int) -> None:
        """Makes the first follower of a row that gives up the one that computes."""
        if followers := self._unlead(row):
            self._leaders[self._key(row)] = followers[0]
            self._followers[followers[0]] = followers[1:]
            self._lead(followers[0])

    def _unlead(self, row: int) -> list[int]:
        """Ends a row's leadership, if it has one, and returns those that waited for it."""
        if self._leaders.get(key := self._key(row)) == row:
            del self._leaders[key]
        return self._followers.pop(row, [])

    def _key(self, row: int) -> bytes:
        return self.rows.token_ids[row, : self.rows.length[row]].tobytes()

    def _take_row(self) -> int:
        if not self._free:
            _, row = self._idle.popitem(last=False)
            self._drop(row)
            self.evictions += 1
        return self._free.pop()

    def _drop(self, row: int) -> None:
        if self.rows.slot[row] != NO_SLOT:
            self._cache.free(int(self.rows.slot[row]))
        self.rows.slot[row] = NO_SLOT
        self.rows.cached[row] = 0
        self.rows.session[row] = ""
        self._free.append(row)


def _fair_shares(missing: np.ndarray, budget: int) -> np.ndarray:
    """Returns max-min fair shares of `budget` for needs in ascending order, at least one token each."""
    shares = np.zeros_like(missing)
    for i, need in enumerate(missing.tolist()):
        shares[i] = min(need, max(1, budget // (missing.size - i)))
        budget -= int(shares[i])
    return shares


def _similar(shares: np.ndarray) -> Iterator[tuple[int, int]]:
    """Splits ascending shares into runs whose largest is at most twice their smallest (or at most 8)."""
    begin = 0
    for i in range(1, shares.size + 1):
        if i == shares.size or shares[i] > max(2 * shares[begin], 8):
            yield begin, i
            begin = i
