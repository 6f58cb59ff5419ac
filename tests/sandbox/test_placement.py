"""Placement decides on stale views; these are the properties that a wrong guess must not break."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.placement import Demand, NodeView, Placer, Room, homes, least_loaded

ONE = Room(1, 1 << 20, 0.5, 8)


def view(name: str, used: int = 0, most: int = 10, at: float = 0.0, **more: object) -> NodeView:
    capacity = Room(most, most << 20, most / 2, 8 * most)
    return NodeView(name, at, capacity, Room(used, used << 20, used / 2, 8 * used), **more)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    loads=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    closed=st.sets(st.integers(0, 11)),
    choices=st.integers(0, 14),
    seed=st.integers(0, 99),
)
def test_the_pick_is_eligible_and_best_of_enough(
    loads: list[int], closed: set[int], choices: int, seed: int
) -> None:
    asked: list[int] = []

    def load(place: int) -> float:
        asked.append(place)
        return loads[place]

    places = range(len(loads))
    got = least_loaded(places, lambda place: place not in closed, load, choices, random.Random(seed))
    open_places = [place for place in places if place not in closed]
    if not open_places:
        assert got is None
        return
    assert got in open_places
    seen = {place for place in asked if place in open_places}
    assert len(seen) == min(choices or len(loads), len(open_places))
    assert loads[got] == min(loads[place] for place in seen)


def test_the_draw_is_uniform_among_the_eligible() -> None:
    rng = random.Random(0)
    drawn = Counter(
        least_loaded(range(10), lambda place: place % 2 == 0, lambda _: 0.0, 1, rng) for _ in range(5000)
    )
    assert set(drawn) == {0, 2, 4, 6, 8}
    assert all(880 < times < 1120 for times in drawn.values())


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("answer"), st.integers(0, 50), st.booleans()),
        st.tuples(st.just("heartbeat"), st.integers(0, 3), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=30, deadline=None)
@given(steps=_STEPS, seed=st.integers(0, 9), choices=st.integers(0, 3))
def test_a_front_alone_knows_exactly_what_its_nodes_hold(
    steps: list[tuple[str, int, bool]], seed: int, choices: int
) -> None:
    """View and in-flight table add up to the truth, whether a heartbeat saw a request under way or not."""
    placer, held, waiting, now = Placer(seed, choices), Counter[str](), dict[int, str](), 0.0
    undone = Counter[str]()  # seen under way by the last heartbeat, and refused since
    seen = set[int]()
    names = [f"n{number}" for number in range(4)]
    for name in names:
        placer.observe(view(name, most=3))
    for kind, value, flag in steps:
        now += 0.1
        if kind == "create":
            name = placer.pick(Demand(ONE), now)
            assert (name is None) == all(held[n] + undone[n] == 3 for n in names)
            if name is not None:
                held[name] += 1
                waiting[placer.begin(name, ONE)] = name
        elif kind == "answer" and waiting:
            number = sorted(waiting)[value % len(waiting)]
            name = waiting.pop(number)
            held[name] -= not flag
            undone[name] += not flag and number in seen
            placer.end(number, now, admitted=flag)
        elif kind == "heartbeat":
            name = names[value]
            under_way = {number for number, place in waiting.items() if place == name}
            seen |= under_way if flag else set()
            used = held[name] - len(under_way - seen)
            undone[name] = 0
            placer.observe(view(name, used, most=3, at=now, flights=frozenset(under_way & seen)))
        for name in names:
            total = held[name] + undone[name]
            counted = placer.nodes[name].used.plus(placer.ahead(name))
            assert counted == Room(total, total << 20, total / 2, 8 * total)


def test_the_same_seed_gives_the_same_picks_and_another_does_not() -> None:
    def picks(seed: int) -> list[str | None]:
        placer = Placer(seed, choices=2)
        for number in range(40):
            placer.observe(view(f"n{number}", used=number % 7))
        made: list[str | None] = []
        for _ in range(30):
            name = placer.pick(Demand(ONE), 1.0)
            assert name is not None
            placer.begin(name, ONE)
            made.append(name)
        return made

    assert picks(1) == picks(1) != picks(2)


@pytest.mark.parametrize(
    ("change", "demand"),
    [
        ({"draining": True}, Demand(ONE)),
        ({"at": -20.0}, Demand(ONE)),
        ({"used": 10}, Demand(ONE)),
        ({}, Demand(Room(1, 11 << 20, 0.5, 8))),
        ({}, Demand(Room(1, 1 << 20, 5.5, 8))),
        ({}, Demand(Room(1, 1 << 20, 0.5, 81))),
        ({"backends": {"docker": frozenset({"images"})}}, Demand(ONE, backend="gvisor")),
        ({"backends": {"docker": frozenset({"images"})}}, Demand(ONE, "docker", frozenset({"pause"}))),
        ({"backends": {"docker": frozenset({"images"})}}, Demand(ONE, "", frozenset({"pause"}))),
        ({"labels": {"zone": "b"}}, Demand(ONE, labels={"zone": "a"})),
        ({"labels": {"unit": "2"}}, Demand(ONE, labels={"unit": "1"})),
    ],
)
def test_nodes_that_do_not_fit_are_not_asked(change: dict[str, object], demand: Demand) -> None:
    good = {"backends": {"docker": frozenset({"images", "pause"}), "gvisor": frozenset[str]()}}
    placer = Placer(0)
    placer.observe(view("no", **{"labels": {"zone": "b", "unit": "2"}, **change}))  # type: ignore[arg-type]
    assert placer.pick(demand, 1.0) is None
    placer.observe(view("yes", most=100, labels={"zone": "a", "unit": "1"}, **good))  # type: ignore[arg-type]
    assert placer.pick(demand, 1.0) == "yes"
    assert placer.pick(demand, 1.0, exclude={"yes"}) is None


def test_a_node_that_changes_its_unit_is_found_in_the_new_one() -> None:
    placer = Placer(0)
    placer.observe(view("n", labels={"unit": "1"}))
    placer.observe(view("n", labels={"unit": "2"}, at=1.0))
    assert placer.pick(Demand(ONE, labels={"unit": "1"}), 1.0) is None
    assert placer.pick(Demand(ONE, labels={"unit": "2"}), 1.0) == "n"


def test_a_forgotten_node_takes_its_flights_along() -> None:
    placer = Placer(0)
    placer.observe(view("n"))
    number = placer.begin("n", ONE)
    placer.forget("n")
    placer.end(number, 1.0, admitted=True)
    placer.observe(view("n", at=2.0))
    assert placer.ahead("n") == Room()
    assert placer.pick(Demand(ONE), 2.0) == "n"


@given(names=st.sets(st.text("abc", min_size=1), min_size=2, max_size=9), key=st.text(max_size=5))
def test_a_node_that_goes_moves_only_its_own_keys(names: set[str], key: str) -> None:
    first, second = homes(key, names, 2)
    for gone in names - {first, second}:
        assert homes(key, names - {gone}, 2) == [first, second]
    assert homes(key, names - {first}, 1) == [second]
