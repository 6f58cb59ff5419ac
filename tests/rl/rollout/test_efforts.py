"""Which efforts tasks are drawn at."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.rollout.efforts import EffortDistribution, EffortError, Efforts

LEVELS = (1, 25, 50, 75, 100)


def drawn(distribution: EffortDistribution, tasks: int = 2000, seed: int = 0) -> Counter[int]:
    efforts = Efforts(LEVELS, distribution, seed)
    return Counter(b for index in range(tasks) for b in efforts.of_task(index))


def test_a_ladder_takes_every_level_once_a_task() -> None:
    efforts = Efforts(LEVELS, EffortDistribution(), 0)
    assert [efforts.of_task(i) for i in range(3)] == [LEVELS] * 3
    assert efforts.pool() == LEVELS


def test_weights_are_followed() -> None:
    counts = drawn(EffortDistribution(kind="weighted", weights=(0, 1, 2, 1, 0)))
    assert set(counts) == {25, 50, 75}
    assert counts[50] / sum(counts.values()) == pytest.approx(0.5, abs=0.02)


def test_uniform_draws_reach_every_effort_but_those_held_out() -> None:
    counts = drawn(EffortDistribution(kind="uniform", low=5, high=60, held_out=(10, 37)))
    assert set(counts) == set(range(5, 61)) - {10, 37}
    assert max(counts.values()) < 2 * min(counts.values())


def test_log_uniform_draws_fall_evenly_on_doublings() -> None:
    counts = drawn(EffortDistribution(kind="log_uniform", low=1, high=63))
    total = sum(counts.values())
    for first in (1, 2, 4, 8, 16, 32):
        share = sum(counts[b] for b in range(first, 2 * first)) / total
        assert share == pytest.approx(1 / 6, abs=0.02)


def test_a_share_of_the_draws_are_levels() -> None:
    counts = drawn(EffortDistribution(kind="uniform", levels_share=0.5, held_out=(10,)))
    assert counts[10] == 0
    assert sum(counts[b] for b in LEVELS) / sum(counts.values()) == pytest.approx(
        0.5 + 0.5 * 5 / 99, abs=0.02
    )


@given(st.integers(0, 10**6), st.integers(0, 5), st.sampled_from(["uniform", "log_uniform"]))
def test_a_task_has_the_same_efforts_whenever_it_is_asked_for(index: int, seed: int, kind: str) -> None:
    first, again = (Efforts(LEVELS, EffortDistribution(kind=kind), seed) for _ in range(2))  # type: ignore[arg-type]
    again.of_task(index + 1)
    assert first.of_task(index) == again.of_task(index)
    assert len(first.of_task(index)) == len(first) == len(LEVELS)


def test_another_seed_draws_otherwise() -> None:
    uniform = EffortDistribution(kind="uniform")
    assert drawn(uniform, 50, seed=0) != drawn(uniform, 50, seed=1)


def test_the_pool_is_distributed_as_the_draws() -> None:
    efforts = Efforts(LEVELS, EffortDistribution(kind="uniform", levels_share=0.5, held_out=(37,)), 3)
    pool = Counter(efforts.pool())
    assert pool[37] == 0 and len(pool) == 99
    assert sum(pool[b] for b in LEVELS) / sum(pool.values()) == pytest.approx(0.525, abs=0.04)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "normal"}, "ladder, weighted, uniform or log_uniform"),
        ({"weights": (1, 2)}, "belong to kind=weighted"),
        ({"kind": "weighted"}, "one for each level"),
        ({"kind": "weighted", "weights": (0, 0, 0, 0, 0)}, "not all 0"),
        ({"kind": "weighted", "weights": (1, float("nan"), 1, 1, 1)}, "0 or more"),
        ({"held_out": (10,)}, "no effect with kind=ladder"),
        ({"levels_share": 0.5}, "no effect with kind=ladder"),
        ({"kind": "uniform", "low": 0}, "1 <= low <= high <= 100"),
        ({"kind": "uniform", "low": 60, "high": 50}, "1 <= low <= high <= 100"),
        ({"kind": "uniform", "levels_share": 1.5}, "between 0 and 1"),
        ({"kind": "uniform", "high": 50, "held_out": (60,)}, "outside 1..50"),
        ({"kind": "uniform", "low": 9, "high": 9, "held_out": (9,)}, "leaves no effort"),
        ({"per_task": 0}, "1 or more"),
    ],
)
def test_a_distribution_that_makes_no_sense_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(EffortError, match=message):
        EffortDistribution(**settings)


def test_levels_and_distribution_must_fit() -> None:
    with pytest.raises(EffortError, match="2 numbers for 5 levels"):
        Efforts(LEVELS, EffortDistribution(kind="weighted", weights=(1, 1)), 0)
    uniform = EffortDistribution(kind="uniform", held_out=(50,))
    with pytest.raises(EffortError, match=r"\[50\] are levels and held out"):
        Efforts(LEVELS, uniform, 0)
    assert json.dumps(Efforts(LEVELS, replace(uniform, held_out=()), 0).of_task(0))


def test_a_task_may_be_drawn_once_and_the_levels_come_in_turn() -> None:
    once = Efforts(LEVELS, EffortDistribution(per_task=1), 0)
    assert len(once) == 1
    assert [once.of_task(i) for i in range(6)] == [(1,), (25,), (50,), (75,), (100,), (1,)]
    twice = Efforts(LEVELS, EffortDistribution(per_task=2), 0)
    assert [twice.of_task(i) for i in range(3)] == [(1, 25), (50, 75), (100, 1)]
    assert Counter(once.pool()) == Counter(dict.fromkeys(LEVELS, len(once.pool()) // 5))


@pytest.mark.parametrize("kind", ["uniform", "log_uniform", "weighted"])
def test_drawing_a_task_less_often_changes_nothing_of_how_efforts_are_distributed(kind: str) -> None:
    weights = (1.0, 2.0, 3.0, 2.0, 1.0) if kind == "weighted" else ()
    each = EffortDistribution(kind=kind, weights=weights)  # type: ignore[arg-type]
    often, once = drawn(each, tasks=1000), drawn(replace(each, per_task=1), tasks=5000)
    assert sum(often.values()) == sum(once.values())
    for low in (1, 26, 51, 76):
        shares = [sum(c[b] for b in range(low, low + 25)) / sum(c.values()) for c in (often, once)]
        assert shares[1] == pytest.approx(shares[0], abs=0.04)
