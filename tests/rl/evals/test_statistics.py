from __future__ import annotations

import itertools
import math
import random

import pytest

from rl.evals.statistics import (
    average,
    by_deadline,
    estimate,
    paired_difference,
    pass_at_k,
    solved_by_one_of,
    wilson,
)


@pytest.mark.parametrize(("samples", "solved"), [(5, 0), (5, 1), (6, 3), (4, 4)])
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_success(samples: int, solved: int) -> None:
    draws = [1] * solved + [0] * (samples - solved)
    for k in range(1, samples + 1):
        subsets = [max(subset) for subset in itertools.combinations(draws, k)]
        assert pass_at_k(samples, solved, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_has_no_bias() -> None:
    draw, chance = random.Random(0), 0.3
    found = [pass_at_k(5, sum(draw.random() < chance for _ in range(5)), 3) for _ in range(20_000)]
    assert sum(found) / len(found) == pytest.approx(1 - (1 - chance) ** 3, abs=0.01)


def test_pass_at_more_than_the_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pass@4 needs at least 4 samples of a task, there are 3"):
        pass_at_k(3, 1, 4)


def test_the_mean_is_over_tasks_and_tasks_without_a_score_do_not_count() -> None:
    found = average([[1.0, 1.0, 1.0, 0.0], [0.0], []])
    assert (found.mean, found.n) == (0.375, 2)


def test_tasks_with_too_few_samples_are_in_no_pass_at_k() -> None:
    found = solved_by_one_of([[1.0, 0.0], [1.0], []], 2, 1.0)
    assert (found.mean, found.n) == (1.0, 1)


def test_nothing_is_known_of_nothing() -> None:
    found = average([[], []])
    assert found.n == 0
    assert math.isnan(found.mean)
    assert math.isnan(found.low)


def test_wilsons_interval_is_the_published_one() -> None:
    """Newcombe (1998), table I: 81 of 263 and 0 of 20, method 3."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(1.0, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)


def test_equal_values_claim_no_certainty() -> None:
    found = estimate([1.0] * 20)
    assert (found.method, found.high) == ("wilson", 1.0)
    assert found.low == pytest.approx(0.8389, abs=1e-4)


def test_the_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    draw, covered = random.Random(1), 0
    for _ in range(200):
        values = [sum(draw.random() < 0.4 for _ in range(4)) / 4 for _ in range(60)]
        found = estimate(values)
        covered += found.low <= 0.4 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_pairs_are_sharper_than_two_intervals() -> None:
    draw = random.Random(2)
    first = [draw.random() for _ in range(200)]
    second = [value + 0.02 + 0.01 * draw.random() for value in first]
    gap = paired_difference(first, second)
    assert 0.02 < gap.low < gap.mean < gap.high < 0.03
    assert average([[v] for v in first]).high > average([[v] for v in second]).low


def test_what_runs_beyond_a_deadline_has_nothing_yet() -> None:
    tasks = [[(1.0, 0.5), (1.0, 3.0)], [(0.5, 1.0)]]
    assert by_deadline(tasks, 1.0) == ((1.0, 0.0), (0.5,))
    assert by_deadline(tasks, 3.0) == ((1.0, 1.0), (0.5,))
