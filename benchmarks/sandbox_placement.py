"""What looking at k random nodes costs and saves against always taking the best node, on stale views.

    python -m benchmarks.sandbox_placement [--seconds 2.5] [--seed 0]

Virtual time, the placement code itself, and a model of the rest at the scale that DSec reports: 1,000 nodes
that hold 3 million sandboxes (each lives 600 s on average, so 5,000 end a second), 5,000 creates a second for
the whole cluster through 8 fronts, and from the second second on a burst of 32,000 creates within 3 s for one
scale unit of 160 nodes. A node admits 3,500 sandboxes, starts 100 a second, and refuses once 160 wait for
their start. Every front hears of every node each second, at times of its own, and knows of its own requests.
A refused create is tried on three more nodes, then it is given back to the caller.

A policy's figures: *refused*, the share of requests to a node that the node refused; *given back*, the share
of creates that found no node; *queue*, how many sandboxes waited for their start on the node that took one,
99th percentile and most; *balance*, within the unit of the burst the creates that the busiest node took over
the mean node's (1 is even).

It shows, and exits with 1 otherwise: the best of k = 2..5 has at most a twentieth of the refusals of global
best and a better balance, and gives nothing back. Fronts that all take the best node of a stale view run for
the same ones. One random node (k = 1) refuses little while all nodes are alike.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from sandbox.placement import UNIT, Demand, NodeView, Placer, Room

NODES, UNIT_NODES, FRONTS = 1000, 160, 8
CAPACITY, LIVE, STARTING = 3500, 3000, 160
STARTS_PER_S, START_S, LIFE_S = 100.0, 0.2, 600.0
CREATES_PER_S, BURST, BURST_AT_S, BURST_S = 5000, 32_000, 1.0, 1.0
HEARTBEAT_S, NETWORK_S, TRIES = 1.0, 0.001, 4
BOX = Room(1, 1 << 20, 0.1, 8)
WHOLE = Room(CAPACITY, CAPACITY << 21, CAPACITY, CAPACITY * 16)


@dataclass(slots=True)
class Node:
    """A node: what it holds, and its queue of starts."""

    name: str
    unit: str
    live: int
    touched_s: float = 0.0
    free_s: float = 0.0
    under_way: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    starting: int = 0
    taken: int = 0

    def age(self, now_s: float, rng: np.random.Generator) -> None:
        """Ends what ended since it was last looked at; lives are exponential, so only the number counts."""
        ended = int(rng.poisson(self.live * (now_s - self.touched_s) / LIFE_S))
        self.live, self.touched_s = max(self.live - ended, 0), now_s

    def admit(self, now_s: float) -> float | None:
        """Returns when the sandbox will be up, or None for a refusal."""
        if self.starting >= STARTING or self.live + self.starting >= CAPACITY:
            return None
        self.starting, self.taken = self.starting + 1, self.taken + 1
        self.free_s = max(now_s, self.free_s) + 1 / STARTS_PER_S
        return self.free_s + START_S

    def view(self, front: int, now_s: float) -> NodeView:
        """Returns what a heartbeat tells a front."""
        held = self.live + self.starting
        used = Room(held, held << 20, held * 0.1, held * 8)
        flights = frozenset(self.under_way.get(front, ()))
        return NodeView(
            self.name, now_s, WHOLE, used, self.starting, STARTING, flights, {}, {UNIT: self.unit}
        )


@dataclass(slots=True)
class Outcome:
    """What a policy came to."""

    asked: int = 0
    refused: int = 0
    creates: int = 0
    given_back: int = 0
    queue: list[int] = field(default_factory=list[int])
    balance: float = 0.0

    @property
    def refusals(self) -> float:
        """The share of requests to nodes that were refused."""
        return self.refused / self.asked


class World:
    """A cluster in virtual time, placed on by one policy."""

    def __init__(self, choices: int, seed: int):
        self._rng, self._draws = random.Random(seed), np.random.default_rng(seed)
        live = self._draws.normal(LIVE, LIVE**0.5, NODES).astype(int)
        self._nodes = {
            f"n{number}": Node(
                f"n{number}",
                str(number // UNIT_NODES),
                min(int(held), CAPACITY),
            )
            for number, held in enumerate(live)
        }
        self._fronts = [Placer(seed + front, choices) for front in range(FRONTS)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self.outcome = Outcome()

    def run(self, seconds: float) -> Outcome:
        """Runs the cluster and returns what happened."""
        for front in range(FRONTS):
            for node in self._nodes.values():
                self._fronts[front].observe(node.view(front, 0.0))
                self._at(self._rng.uniform(0, HEARTBEAT_S), self._heartbeat(front, node))
        for number in range(int(CREATES_PER_S * seconds)):
            self._at(number / CREATES_PER_S, self._create({}))
        for number in range(BURST):
            self._at(BURST_AT_S + number * BURST_S / BURST, self._create({UNIT: "0"}))
        while self._events and self._events[0][0] < seconds:
            now, _, act = heapq.heappop(self._events)
            act(now)
        taken = [node.taken for node in self._nodes.values() if node.unit == "0"]
        self.outcome.balance = max(taken) / statistics.fmean(taken)
        return self.outcome

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def _heartbeat(self, front: int, node: Node) -> Callable[[float], None]:
        def act(now: float) -> None:
            node.age(now, self._draws)
            self._fronts[front].observe(node.view(front, now))
            self._at(now + HEARTBEAT_S, act)

        return act

    def _create(self, labels: dict[str, str]) -> Callable[[float], None]:
        demand = Demand(BOX, labels=labels)

        def act(now: float) -> None:
            self.outcome.creates += 1
            self._ask(self._rng.randrange(FRONTS), demand, (), now)

        return act

    def _ask(self, front: int, demand: Demand, tried: tuple[str, ...], now: float) -> None:
        placer = self._fronts[front]
        name = placer.pick(demand, now, tried) if len(tried) < TRIES else None
        if name is None:
            self.outcome.given_back += 1
            return
        flight = placer.begin(name, BOX)

        def arrive(now: float) -> None:
            node = self._nodes[name]
            self.outcome.asked += 1
            node.age(now, self._draws)
            up = node.admit(now)
            if up is None:
                self.outcome.refused += 1
                self._at(now + NETWORK_S, refused)
            else:
                self.outcome.queue.append(node.starting)
                node.under_way.setdefault(front, set()).add(flight)
                self._at(up, started)

        def refused(now: float) -> None:
            placer.end(flight, now, admitted=False)
            self._ask(front, demand, (*tried, name), now)

        def started(now: float) -> None:
            node = self._nodes[name]
            node.starting, node.live = node.starting - 1, node.live + 1
            node.under_way[front].discard(flight)
            self._at(now + NETWORK_S, lambda now: placer.end(flight, now, admitted=True))

        self._at(now + NETWORK_S, arrive)


def main() -> int:
    """Compares the policies; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.5, help="of virtual time (default 2.5)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{'policy':>12} {'refused':>9} {'given back':>10} {'queue p99':>9} {'max':>4} {'balance':>8}")
    found: dict[int, Outcome] = {}
    for choices in (0, 1, 2, 3, 4, 5):
        found[choices] = got = World(choices, arguments.seed).run(arguments.seconds)
        name = f"k = {choices}" if choices else "global best"
        back, p99 = got.given_back / got.creates, int(np.percentile(got.queue, 99))
        print(
            f"{name:>12} {got.refusals:>9.3%} {back:>10.3%} {p99:>9} {max(got.queue):>4} {got.balance:>8.3f}",
            flush=True,
        )
    best = min((2, 3, 4, 5), key=lambda k: (found[k].refused, found[k].balance))
    one, every, it = found[1], found[0], found[best]
    held = it.refusals <= every.refusals / 20 and it.balance < every.balance and not it.given_back
    print(
        f"k = {best}: {it.refusals:.3%} refused, balance {it.balance:.3f}; global best: "
        f"{every.refusals:.3%}, {every.balance:.3f}; one random node: {one.refusals:.3%}, {one.balance:.3f}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
