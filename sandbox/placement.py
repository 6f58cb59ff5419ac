"""Placement: which node gets a sandbox, decided on views that are some seconds old.

A front hears of its nodes by heartbeats and knows of its own requests that no heartbeat has reported yet. It
filters (backend, capabilities, labels, room), draws k of the nodes that are left, and takes the one that is
least loaded by both. A wrong guess costs one refusal: the node has the last word and the front picks again.
Looking at k random nodes instead of at all keeps fronts that share a stale view from running for the same
few nodes (Mitzenmacher, How useful is old information?, 2000). Nothing here waits, and nothing is kept
that a restart needs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
UNIT = "unit"
"""The label of a node that names its scale unit: nodes that share nothing with those of other units."""


class Room(NamedTuple):
    """An amount of what a node has to give, or of what a sandbox takes of it."""

    sandboxes: int = 0
    memory_bytes: int = 0
    cpus: float = 0.0
    pids: int = 0

    def plus(self, other: Room, times: int = 1) -> Room:
        """Returns the sum with `times` of another amount."""
        return Room(
            self.sandboxes + times * other.sandboxes,
            self.memory_bytes + times * other.memory_bytes,
            self.cpus + times * other.cpus,
            self.pids + times * other.pids,
        )

    def within(self, most: Room) -> bool:
        """Whether no part of it is above that of `most`."""
        return (
            self.sandboxes <= most.sandboxes
            and self.memory_bytes <= most.memory_bytes
            and self.cpus <= most.cpus
            and self.pids <= most.pids
        )

    def share(self, whole: Room) -> float:
        """Returns the largest share that a part of it is of the part of `whole`."""
        return max(
            self.sandboxes / max(whole.sandboxes, 1),
            self.memory_bytes / max(whole.memory_bytes, 1),
            self.cpus / max(whole.cpus, 1e-9),
            self.pids / max(whole.pids, 1),
        )


NOTHING = Room()


@dataclass(frozen=True, slots=True)
class NodeView:
    """What a heartbeat said of a node.

    Attributes:
        name: Of the node.
        taken_s: When the front asked for it, on the front's clock: the state is not older than that.
        capacity: What the node admits in all.
        used: What it has given away, starting sandboxes included.
        starting: Sandboxes that wait for their start or are being started.
        starting_limit: How many of these it takes.
        flights: Numbers of this front's requests that were under way there, counted in `used` and `starting`.
        backends: By name, the capabilities that each holds there.
        labels: The operator's, `unit` among them.
        draining: Whether it takes no more.
        warm: Sandboxes that wait there to be claimed, by pool; counted in `used`.
    """

    name: str
    taken_s: float
    capacity: Room
    used: Room = NOTHING
    starting: int = 0
    starting_limit: int = 64
    flights: frozenset[int] = frozenset()
    backends: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    draining: bool = False
    warm: Mapping[str, int] = field(default_factory=dict[str, int])

    def about(self) -> dict[str, Any]:
        """Returns what operators are told of it, as JSON values."""
        return {
            "used": self.used, "capacity": self.capacity, "starting": self.starting,
            "labels": dict(self.labels), "backends": sorted(self.backends), "draining": self.draining,
            "warm": sum(self.warm.values()),
        }  # fmt: skip

    def amounts(self) -> dict[str, float]:
        """Returns what is measured of it."""
        return {
            "sandboxes": self.used.sandboxes, "memory_bytes": self.used.memory_bytes,
            "capacity": self.capacity.sandboxes, "starting": self.starting, "draining": self.draining,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs of a node; without a backend any will do."""

    room: Room
    backend: str = ""
    capabilities: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


def least_loaded(
    candidates: Sequence[T],
    eligible: Callable[[T], bool],
    load: Callable[[T], float],
    choices: int,
    rng: random.Random,
) -> T | None:
    """Returns the least loaded of `choices` random eligible candidates; of all of them for 0.

    The draw is without replacement and uniform among the eligible, as if the others had been filtered out
    before; ties go to the one drawn first.
    """
    if choices == 0:
        first = min(candidates, key=load, default=None)
        if first is None or eligible(first):
            return first
        return min(filter(eligible, candidates), key=load, default=None)
    best, best_load, found = None, 0.0, 0
    moved: dict[int, int] = {}
    for left in range(len(candidates), 0, -1):  # a shuffle that stops early
        at, last = rng.randrange(left), left - 1
        candidate = candidates[moved.get(at, at)]
        moved[at] = moved.get(last, last)
        if not eligible(candidate):
            continue
        if (now := load(candidate)) < best_load or best is None:
            best, best_load = candidate, now
        found += 1
        if found == choices:
            break
    return best


def homes(key: str, names: Iterable[str], most: int) -> list[str]:
    """Returns the `most` nodes on which a request named `key` is looked for and made, in this order.

    By rendezvous hashing: all fronts find the same, and a node that comes or goes moves only its own.
    """
    return sorted(names, key=lambda name: hashlib.sha256(f"{key}\0{name}".encode()).digest())[:most]


@dataclass(slots=True)
class _Flight:
    """A request of this front, until it is answered and a heartbeat must have counted it."""

    node: str
    room: Room
    payer: str
    settled_s: float | None = None
    seen: bool = False


@dataclass(slots=True)
class _Known:
    """A node: its view, and what this front has under way there on top of it."""

    view: NodeView
    ahead: Room = NOTHING
    starting: int = 0
    load: float = 0.0
    free: Room = NOTHING
    flights: set[int] = field(default_factory=set[int])

    def weigh(self) -> None:
        """Works out what is free, and the load: how full it is, and how busy with starts."""
        taken = self.view.used.plus(self.ahead)
        self.free, full = self.view.capacity.plus(taken, -1), taken.share(self.view.capacity)
        busy = (self.view.starting + self.starting) / max(self.view.starting_limit, 1)
        self.load = full + busy


class Placer:
    """A front's picture of its nodes; the same calls with the same seed give the same picks."""

    def __init__(self, seed: int, choices: int = 2, stale_s: float = 15.0):
        """Starts without nodes.

        Args:
            seed: Of the draws.
            choices: k, how many random nodes are compared; 0 compares all.
            stale_s: How old a view may be before its node gets nothing more.
        """
        self._rng, self._choices, self._stale_s = random.Random(seed), choices, stale_s
        self._nodes: dict[str, _Known] = {}
        self._units: dict[str, list[str]] = {}
        self._flights: dict[int, _Flight] = {}
        self._paid: dict[str, Room] = {}
        self._numbers = count(1)

    @property
    def nodes(self) -> dict[str, NodeView]:
        """The views, by name."""
        return {name: known.view for name, known in self._nodes.items()}

    def observe(self, view: NodeView) -> None:
        """Takes a heartbeat; what it must have counted already is not counted on top of it any more."""
        known = self._nodes.get(view.name)
        if known is None:
            known = self._nodes[view.name] = _Known(view)
            self._index(view, add=True)
        elif known.view.labels.get(UNIT, "") != view.labels.get(UNIT, ""):
            self._index(known.view, add=False)
            self._index(view, add=True)
        known.view = view
        for number in list(known.flights):
            self._compare(known, number)
        known.weigh()

    def _compare(self, known: _Known, number: int) -> None:
        flight, view = self._flights[number], known.view
        if flight.settled_s is not None and (flight.settled_s <= view.taken_s or number in view.flights):
            self._land(number)
        elif number in view.flights and not flight.seen:
            self._uncount(known, flight)
            flight.seen = True

    def forget(self, name: str) -> None:
        """Takes a node out; what was under way there is nobody's any more."""
        if (known := self._nodes.pop(name, None)) is not None:
            self._index(known.view, add=False)
            for number in known.flights:
                self._uncount(known, self._flights.pop(number))

    def pick(self, demand: Demand, now_s: float, exclude: Collection[str] = ()) -> str | None:
        """Returns the node that is to be asked, or None when none fits."""
        unit = demand.labels.get(UNIT)
        among = self._units.get("" if unit is None else f"={unit}", [])
        return least_loaded(
            among,
            lambda name: name not in exclude and self._fits(self._nodes[name], demand, now_s),
            lambda name: self._nodes[name].load,
            self._choices,
            self._rng,
        )

    def homes(self, key: str, demand: Demand, most: int) -> list[str]:
        """Returns where a request named `key` belongs, whether these nodes have room now or not."""
        wanted = [name for name, known in self._nodes.items() if offers(known.view, demand)]
        return homes(key, wanted, most)

    def begin(self, name: str, room: Room, payer: str = "") -> int:
        """Counts a request that is about to be sent to a node for somebody's account; returns its number."""
        number = next(self._numbers)
        self._flights[number] = _Flight(name, room, payer)
        self._paid[payer] = self.paid(payer).plus(room)
        known = self._nodes[name]
        known.flights.add(number)
        known.ahead, known.starting = known.ahead.plus(room), known.starting + 1
        known.weigh()
        return number

    def end(self, number: int, now_s: float, *, admitted: bool) -> None:
        """Takes the node's answer; what it admitted counts here until a heartbeat asked for after it."""
        flight = self._flights.get(number)
        if flight is None:
            return
        known = self._nodes[flight.node]
        if flight.seen or not admitted:
            self._land(number)
        else:
            flight.settled_s = now_s
            known.starting -= 1
        known.weigh()

    def ahead(self, name: str) -> Room:
        """Returns what is counted of a node on top of its view."""
        return self._nodes[name].ahead

    def paid(self, payer: str) -> Room:
        """Returns what is counted on top of all views for somebody's account."""
        return self._paid.get(payer, NOTHING)

    def paid_at(self, name: str, payer: str) -> Room:
        """Returns what of that is on one node."""
        total = NOTHING
        for number in self._nodes[name].flights if name in self._nodes else ():
            flight = self._flights[number]
            total = total.plus(flight.room) if flight.payer == payer and not flight.seen else total
        return total

    @property
    def payers(self) -> set[str]:
        """For whose accounts something is counted on top of all views."""
        return {*self._paid}

    def load(self, name: str) -> float:
        """Returns a node's load: its dominant share in use, plus its share of starts."""
        return self._nodes[name].load

    def _fits(self, known: _Known, demand: Demand, now_s: float) -> bool:
        view = known.view
        return (
            not view.draining
            and now_s - view.taken_s <= self._stale_s
            and demand.room.within(known.free)
            and offers(view, demand)
        )

    def _land(self, number: int) -> None:
        flight = self._flights.pop(number)
        known = self._nodes[flight.node]
        known.flights.discard(number)
        self._uncount(known, flight)

    def _uncount(self, known: _Known, flight: _Flight) -> None:
        if not flight.seen:
            known.ahead = known.ahead.plus(flight.room, -1)
            known.starting -= flight.settled_s is None
            left = self._paid[flight.payer].plus(flight.room, -1)
            self._paid[flight.payer] = left
            if not left.sandboxes:
                del self._paid[flight.payer]

    def _index(self, view: NodeView, *, add: bool) -> None:
        for unit in ("", f"={view.labels.get(UNIT, '')}"):
            names = self._units.setdefault(unit, [])
            (names.append if add else names.remove)(view.name)


def offers(view: NodeView, demand: Demand) -> bool:
    """Whether a node is of the kind that is asked for, whatever its load."""
    for name, value in demand.labels.items():
        if view.labels.get(name) != value:
            return False
    if demand.backend:
        return demand.capabilities <= view.backends.get(demand.backend, frozenset()) and (
            demand.backend in view.backends
        )
    return not demand.capabilities or any(demand.capabilities <= held for held in view.backends.values())
