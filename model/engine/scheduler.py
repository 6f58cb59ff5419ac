"""Who is served next: admission, sessions that keep their caches, shared prompts, and who gives way.

Every row has a place for a sequence in the policy's cache. Requests are admitted in the order they came. A
row that is not served keeps the caches of its session until its place or its pages are needed: the session
that was used least recently goes first, and is computed anew when it comes back. Requests with the same
history that are admitted while it is being computed wait for it and get a fork of the cache.

When pages run out and no idle session is left, the request that came last gives up its caches and waits again
at the head of the queue, with its tokens and all that was recorded of them. The one that came first therefore
never gives way while there is another, gets all pages in the end, and finishes; then it is the next one's
turn. A draw depends on seed and position alone, so the tokens are those of an engine with room for all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from model.engine.plan import StepPlan, split_prefill
from model.engine.prefixes import Prefixes, Wanted
from model.engine.replay import NO_FLOOR, Bound, Floor, Memory, Past, ReplayRule
from model.engine.requests import Pending
from model.engine.rows import NO_SLOT, Rows

# A call of the policy has a fixed cost, for small policies that of decoding about a hundred rows. Rows that
# need little prefill are therefore gathered for a few steps, unless they are a good part of all rows.
_GATHER_STEPS = 4


Key = tuple[object, ...]
"""What rows that share caches have in common."""


class Cache(Protocol):
    """What the engine asks of a policy's cache: places for sequences."""

    storage: Any
    pages: Any
    """The page table, or None where every slot has room of its own."""

    def allocate(self) -> int:
        """Returns a free, empty slot."""
        ...

    def fork(self, slot: int) -> int:
        """Returns a new slot with the same content."""
        ...

    def free(self, slot: int) -> None:
        """Gives a slot back."""
        ...

    def length(self, slot: int) -> int:
        """Returns the tokens held in a slot."""
        ...

    def export_slot(self, slot: int) -> dict[str, Tensor]:
        """Returns everything that is held of a slot."""
        ...

    def check_slot(self, state: dict[str, Tensor]) -> int:
        """Returns the tokens of an exported slot. Raises ValueError when it does not fit."""
        ...

    def import_slot(self, state: dict[str, Tensor]) -> int:
        """Returns a new slot with what another cache exported."""
        ...


class Scheduler:
    """Rows, sessions and queues of an engine.

    `running` rows decode, `prefilling` rows are being computed, `ready` rows wait to be handed over.
    """

    def __init__(
        self,
        rows: Rows,
        cache: Cache,
        *,
        max_running: int,
        rule: ReplayRule,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.rows = rows
        self.max_running = max_running
        self.waiting: deque[Pending] = deque()
        self.running = np.zeros(0, np.int64)
        self.prefilling: list[int] = []
        self.ready: list[int] = []
        self.new_starts: dict[int, tuple[Floor, ...]] = {}
        self.memory = Memory()
        self.evictions = 0
        self.preemptions = 0
        self.forks = 0
        self.decode_tokens = 1
        """The most tokens of a row that decodes in one step; where pages are short it is one."""
        self._rule, self._prefixes = rule, prefixes
        self._gathered = 0
        self._cache = cache
        self._free = list(range(rows.count - 1, -1, -1))
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._row_of: dict[int, int] = {}
        self._leaders: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
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

    def waiter(self, request_id: int) -> Pending | None:
        """Returns a request that waits, or None."""
        return next((pending for pending in self.waiting if pending.request_id == request_id), None)

    def withdraw(self, pending: Pending) -> None:
        """Takes a request out of the queue; what its session needs to go on is remembered."""
        self.waiting.remove(pending)
        if pending.floor is not None:
            past = pending.before
            if pending.history.size > pending.start:
                past = Past(pending.history, pending.floor, pending.replayed)
            self.memory.keep(pending.request.session, past)

    def admit(self) -> None:
        """Gives rows to waiting requests, in order, as long as there is room for them."""
        while self.waiting and self.served < self.max_running and self._make_room_for(self.waiting[0]):
            pending = self.waiting.popleft()
            row = self._known_row(pending)
            if row is None:
                row = self._take_row()
                self._open_new(row, pending)
            else:
                self._open_known(row, pending)
            self._row_of[pending.request_id] = row

    def plan(self, budget: int) -> StepPlan:
        """Says what this step computes, of which at most about `budget` tokens of prefill.

        The prefill is split max-min fairly. Where pages are short, idle sessions and then the requests that
        came last give way.
        """
        due = self._prefill_is_due(budget)
        while True:
            prefill = split_prefill(self.rows, self.prefilling, budget) if due else []
            for each in sorted({self.decode_tokens, 1}, reverse=True):
                plan = StepPlan(self.running, prefill, each)
                if self._fits(*plan.flat(self.rows)):
                    return plan
            if not self._evict():
                self._give_way()

    def go_on(self, rows: np.ndarray) -> None:
        """Lets `rows` decode in the next step, besides those that do already."""
        self.running = np.append(self.running, rows[~np.isin(rows, self.running)])

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
            self.rows.inherit(follower, row)
            self._set_floor(follower, self.rows.floor[row], self.rows.before[follower])
            self.forks += 1
        return [row, *followers]

    def end(self, row: int, *, keep: bool) -> None:
        """Ends the service of a row; with `keep` its caches stay for the session's next turn."""
        complete = self._withdraw_row(row)
        if keep and complete and self.rows.cached[row] > 0:
            self._keep(row)
            self._idle[self.rows.session[row]] = row
            return
        if keep:
            self.memory.keep(self.rows.session[row], self.rows.past(row))
        self._drop(row)

    def forget(self, session: str) -> None:
        """Frees the caches of an idle session, and what is remembered of it."""
        self.memory.forget(session)
        if (row := self._idle.pop(session, None)) is not None:
            self._drop(row)

    def keep_caches(self) -> None:
        """Notes that all caches are now older than the weights."""
        self.rows.mixed |= self.rows.cached > 0
        for pending in self.waiting:
            pending.mixed |= pending.caches is not None

    def recompute(self, cache: Cache | None = None) -> None:
        """Empties all caches, or goes over to a new one.

        Idle sessions give up theirs, rows that are served are computed anew, with the windows they had.
        """
        while self._evict():
            pass
        self.prefilling += [*map(int, self.running), *self.ready]
        for row in self.prefilling:
            self._cache.free(int(self.rows.slot[row]))
        self._cache = self._cache if cache is None else cache
        for row in self.prefilling:
            self.rows.slot[row] = self._cache.allocate()
            self._forget_caches(row)
        for pending in self.waiting:
            pending.caches, pending.cached = None, 0
        self.running, self.ready = np.zeros(0, np.int64), []

    # Admission.

    def _known_row(self, pending: Pending) -> int | None:
        """The idle row that the request continues; one that it does not continue is dropped."""
        row = self._idle.pop(pending.request.session, None)
        if row is not None and not self.rows.matches(row, pending):
            self.memory.keep(pending.request.session, self.rows.past(row))
            self._drop(row)
            return None
        return row

    def _open_known(self, row: int, pending: Pending) -> None:
        before, sampled = self.rows.past(row), int(self.rows.cached[row])
        self.rows.open(row, pending)
        known = self.rows.floor[row]
        floor = self._rule.floor(known, sampled, pending.history.size)
        self.rows.replayed[row] &= floor == known
        self._set_floor(row, floor, before)
        self.prefilling.append(row)

    def _open_new(self, row: int, pending: Pending) -> None:
        self.rows.cached[row], self.rows.mixed[row] = 0, False
        self.rows.open(row, pending)
        self._plan_floor(row, pending)
        if pending.caches is not None:
            self._restore(row, pending)
            return
        key = self._key(row)
        if (leader := self._leaders.get(key)) is None:
            self._lead(row, key)
        else:
            self._followers.setdefault(leader, []).append(row)

    def _plan_floor(self, row: int, pending: Pending) -> None:
        """Fixes where the windows of a row without caches start, and whether that is as it was before."""
        request, rule, size = pending.request, self._rule, pending.history.size
        known = self.memory.recall(request.session)
        # A history that does not go on from the known past was written anew: it is a prompt like any other.
        past = known if known is not None and known.begins(pending.history) else None
        starts, before = request.completed.replay_starts, pending.before or past
        replayed = pending.replayed
        if pending.floor is not None:
            floor = pending.floor
            # Compressed keys of a prefix found in a store were computed with the encoder's windows before.
            replayed |= floor[0] > 0 and pending.caches is None
        elif starts and rule.mode == "bounded":
            floor = starts[-1]
            replayed = floor[0] > 0
        elif past is not None:
            floor = rule.floor(past.floor, past.token_ids.size - 1, size)
            replayed = floor == past.floor and (past.replayed or floor[0] > 0)
        else:
            floor = rule.floor(None, 0, pending.start)
            unknown = request.continues and known is None
            replayed = rule.mode == "bounded" and unknown and floor != NO_FLOOR
        self.rows.replayed[row] = replayed
        turn = pending.floor is not None or bool(starts)
        self.rows.bound[row] = Bound.TURN if turn else Bound.NOTHING if past is None else Bound.PAST
        self._set_floor(row, floor, before)

    def _set_floor(self, row: int, floor: Floor, before: Past | None) -> None:
        request = self.rows.request[row]
        assert request is not None
        self.rows.floor[row], self.rows.before[row] = floor, before
        recorded, known = self._rule.recorded(floor), request.completed.replay_starts
        fresh = not self.rows.replayed[row] and recorded not in known[-1:]
        self.rows.starts[row] = (*known, recorded) if fresh else known
        request_id = int(self.rows.request_id[row])
        if fresh and recorded != NO_FLOOR:
            self.new_starts[request_id] = self.rows.starts[row]
        else:
            self.new_starts.pop(request_id, None)

    def _restore(self, row: int, pending: Pending) -> None:
        """Gives a row the caches that came with its request."""
        assert pending.caches is not None
        self.rows.slot[row] = self._cache.import_slot(pending.caches)
        self.rows.cached[row], self.rows.mixed[row] = pending.cached, pending.mixed
        if pending.cached == self.rows.length[row] - 1 >= pending.start:
            self.running = np.append(self.running, row)
        else:
            self.prefilling.append(row)

    def _lead(self, row: int, key: Key) -> None:
        """Makes a row the one that computes what all rows of `key` have in common."""
        self._leaders[key], self._keys[row] = row, key
        begun = None if self._prefixes is None else self._prefixes.begin(self._cache, self._wanted(row))
        if begun is None:
            self.rows.slot[row] = self._cache.allocate()
        else:
            self.rows.slot[row], self.rows.cached[row] = begun.slot, begun.cached
            self.rows.replayed[row] = begun.replayed
            self._set_floor(row, begun.floor, self.rows.before[row])
        self.prefilling.append(row)

    def _wanted(self, row: int) -> Wanted:
        rows, request = self.rows, self.rows.request[row]
        assert request is not None
        tokens = rows.token_ids[row, : rows.length[row]]
        return Wanted(tokens, request.images, rows.floor[row], Bound(rows.bound[row]))

    def _keep(self, row: int) -> None:
        """Leaves the caches of a row to the prefix store, unless earlier weights had a part in them."""
        if self._prefixes is not None and not self.rows.mixed[row]:
            request = self.rows.request[row]
            assert request is not None
            slot = int(self.rows.slot[row])
            self._prefixes.keep(self._cache, slot, self.rows.token_ids[row], request.images)

    def _hand_over(self, row: int) -> None:
        """Makes the first follower of a row that gives up the one that computes."""
        key = self._keys.get(row)
        if followers := self._unlead(row):
            assert key is not None
            self._followers[followers[0]] = followers[1:]
            self._lead(followers[0], key)

    def _unlead(self, row: int) -> list[int]:
        """Ends a row's leadership, if it has one, and returns those that waited for it."""
        if (key := self._keys.pop(row, None)) is not None:
            del self._leaders[key]
        return self._followers.pop(row, [])

    def _key(self, row: int) -> Key:
        """What rows have in common that can share caches."""
        request, tokens = self.rows.request[row], self.rows.token_ids[row, : self.rows.length[row]]
        assert request is not None
        return tokens.tobytes(), request.image_bytes(), self.rows.floor[row], bool(self.rows.replayed[row])

    def _take_row(self) -> int:
        if not self._free:
            self._evict()
        return self._free.pop()

    def _drop(self, row: int) -> None:
        if self.rows.slot[row] != NO_SLOT:
            self._cache.free(int(self.rows.slot[row]))
        self.rows.slot[row] = NO_SLOT
        self.rows.cached[row] = 0
        self.rows.session[row], self.rows.request[row], self.rows.before[row] = "", None, None
        self._free.append(row)

    # Pressure.

    def _prefill_is_due(self, budget: int) -> bool:
        """Says whether this step is to prefill; at the latest every fourth step does, when a row needs it."""
        if not self.prefilling:
            return False
        self._gathered += 1
        stalled = self.served - self.running.size - len(self.ready)
        missing = (self.rows.length - self.rows.cached)[self.prefilling].sum()
        due = stalled * _GATHER_STEPS >= self.running.size or missing >= budget
        if due or self._gathered >= _GATHER_STEPS:
            self._gathered = 0
            return True
        return False

    def _fits(self, rows: list[int], new: list[int], more: int = 0) -> bool:
        """Whether there are pages for `new` tokens in `rows`, and `more` pages."""
        if (pages := self._cache.pages) is None:
            return True
        slots, cached = self.rows.slot[rows].tolist(), self.rows.cached[rows].tolist()
        held = [self._cache.length(slot) for slot in slots]
        # Tokens that only get their windows anew lie on pages already.
        grown = [max(0, c + n - h) for c, n, h in zip(cached, new, held, strict=True)]
        missing = pages.missing(slots, held, grown)
        return missing + more <= pages.free_pages

    def _make_room_for(self, pending: Pending) -> bool:
        """Whether the request and all that are served can come to their next token; idle sessions give way.

        The session's own caches are kept until all others are gone.
        """
        if self._cache.pages is None:
            return True
        while not self._room_for(pending):
            if not self._evict(spare=pending.request.session) and not self._evict():
                assert self.served, "a cache has pages for one full sequence"
                return False
        return True

    def _room_for(self, pending: Pending) -> bool:
        held = [row for row in self._row_of.values() if self.rows.slot[row] != NO_SLOT]
        new = [int(self.rows.length[row] - self.rows.cached[row]) + 1 for row in held]
        more = self.served - len(held)  # a fork copies the page it writes into
        size, idle = pending.history.size + 1, self._idle.get(pending.request.session)
        if idle is not None and self.rows.matches(idle, pending):
            held, new = [*held, idle], [*new, size - int(self.rows.cached[idle])]
        else:
            more += -(-size // self._cache.pages.page_tokens)
        return self._fits(held, new, more)

    def _evict(self, spare: str | None = None) -> bool:
        """Takes the caches of the session that was used least recently; False when there is none."""
        session = next((name for name in self._idle if name != spare), None)
        if session is None:
            return False
        row = self._idle.pop(session)
        self.memory.keep(session, self.rows.past(row))
        self._drop(row)
        self.evictions += 1
        return True

    def _give_way(self) -> None:
        """Puts the request that came last, of those with caches, back to the head of the queue."""
        holders = [i for i, row in self._row_of.items() if self.rows.slot[row] != NO_SLOT]
        assert len(holders) > 1, "a cache has pages for one full sequence"
        row = self._row_of[max(holders)]
        self.waiting.appendleft(self.suspended(row))
        if self._withdraw_row(row):
            self._keep(row)
        self._drop(row)
        self.preemptions += 1

    def suspended(self, row: int) -> Pending:
        """Returns the request of a row with all that was sampled, ready to go on elsewhere or later."""
        rows, request = self.rows, self.rows.request[row]
        assert request is not None
        return Pending(
            int(rows.request_id[row]),
            replace(request, completed=rows.turn(row)),
            rows.token_ids[row, : rows.length[row]].copy(),
            int(rows.start[row]),
            rows.floor[row],
            bool(rows.replayed[row]),
            rows.before[row],
        )

    def _withdraw_row(self, row: int) -> bool:
        """Takes a row out of service; returns whether its caches are whole, so that they can be kept."""
        del self._row_of[int(self.rows.request_id[row])]
        self.rows.request_id[row] = -1
        self.running = self.running[self.running != row]
        if row in self.ready:
            self.ready.remove(row)
        if row in self.prefilling:
            self.prefilling.remove(row)
            self._hand_over(row)
            return self._rule.mode == "off"
        if self.rows.slot[row] == NO_SLOT:
            next(rows for rows in self._followers.values() if row in rows).remove(row)
            return False
        return True

    def _forget_caches(self, row: int) -> None:
        self.rows.cached[row], self.rows.mixed[row] = 0, False
        self.rows.replayed[row] |= self.rows.floor[row][0] > 0
