from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs.registry
from envs.types import TrajectoryKey
from rl.rollout.mixture import Interleave, MixedStream, interleaved
from rl.rollout.stream import TaskStream

SHARES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100), min_size=1)


def stream(shares: dict[str, float], efforts: tuple[int, ...] = (50,)) -> MixedStream:
    sources = {name: TaskStream(envs.registry.load(name), "train", 3, efforts) for name in shares}
    return MixedStream(sources, Interleave(shares))


@settings(deadline=None)
@given(SHARES, st.integers(1, 300))
def test_shares_are_kept_at_every_moment(shares: dict[str, float], places: int) -> None:
    order, total = Interleave(shares), sum(shares.values())
    counts: Counter[str] = Counter()
    for place in range(places):
        name, before = order.at(place)
        assert before == counts[name]
        counts[name] += 1
        for other, share in shares.items():
            assert abs(counts[other] - share / total * (place + 1)) <= max(1.0, len(shares) - 1) + 1e-6


@settings(deadline=None)
@given(SHARES, st.integers(0, 200))
def test_the_order_depends_on_nothing_but_the_shares(shares: dict[str, float], place: int) -> None:
    backwards = dict(reversed(list(shares.items())))
    order = Interleave(shares)
    assert [order.at(p) for p in range(place + 1)][-1] == Interleave(backwards).at(place)


def test_three_to_one_takes_every_fourth() -> None:
    order = Interleave({"calc": 3, "sort": 1})
    assert [order.at(place)[0] for place in range(8)].count("sort") == 2
    assert [order.at(place)[0] for place in range(4)].count("sort") == 1


def test_a_resumed_mixture_draws_the_same_tasks_from_the_same_environments() -> None:
    mixed = stream({"calc": 0.7, "sort": 0.3}, (25, 75))
    drawn = [(mixed.environment(g), *mixed.draw(g)) for g in range(40)]
    again = stream({"sort": 0.3, "calc": 0.7}, (25, 75))
    again.load_state_dict(mixed.state_dict())
    assert [(again.environment(g), *again.draw(g)) for g in range(25, 40)] == drawn[25:]
    assert all(task.id.startswith(name) for name, task, _ in drawn)


def test_an_environment_draws_what_it_would_draw_alone() -> None:
    mixed, alone = stream({"calc": 0.5, "sort": 0.5}), stream({"sort": 1})
    ours = [mixed.draw(g)[0] for g in range(20) if mixed.environment(g) == "sort"]
    assert ours == [alone.draw(g)[0] for g in range(10)]


def test_a_log_pins_nothing_in_a_fixed_order() -> None:
    mixed = stream({"calc": 1})
    before = mixed.draw(5)
    mixed.pin([TrajectoryKey("calc/1*1", 50, "tools", 5, 0)])
    assert mixed.draw(5) == before


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"a": "aaaaaa", "b": "bbb"}, "abaabaab"),
        ({"a": "", "b": "bb"}, "bb"),
        ({"a": "", "b": ""}, ""),
    ],
)
def test_items_are_interleaved_until_a_part_ends(parts: dict[str, str], expected: str) -> None:
    found = interleaved({name: iter(text) for name, text in parts.items()}, {"a": 2, "b": 1})
    assert "".join(islice(found, 8)) == expected
