"""How many drafts a batch checks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.engine.verification import Costs, admit, choose_budget


def costs(draft=1.0, one=10.0, each=0.0):
    """A pass over n tokens costs `one` plus `each` a token."""
    sizes = (1, 100)
    return Costs(sizes, (draft, draft), sizes, (one + each, one + 100 * each))


def falling(rows):
    return np.array(rows, dtype=np.float64).cumprod(axis=1)


def test_all_are_checked_when_a_pass_costs_the_same_for_any_number():
    assert choose_budget(falling([[0.9, 0.9, 0.9]]), costs()) == 3


def test_none_are_checked_when_drafting_costs_more_than_it_gives():
    assert choose_budget(falling([[0.9, 0.9, 0.9]]), costs(draft=100.0)) == 0


def test_drafts_are_checked_as_long_as_the_rate_rises():
    # (1 + sum of survival) / (1 + 4 + tokens): 1/5, 1.9/7, 2.6/8, 2.8/9, 2.85/10, the first without a draft.
    survival = np.array([[0.9, 0.7, 0.2, 0.05]])
    assert choose_budget(survival, costs(draft=1.0, one=4.0, each=1.0)) == 2


def test_a_step_of_the_cost_is_jumped_over_when_it_pays():
    """Costs rise at the second token and then stay: one draft does not pay, four do."""
    stepped = Costs((1,), (0.0,), (1, 2, 5), (1.0, 2.0, 2.0))
    assert choose_budget(falling([[0.8, 1.0, 1.0, 1.0]]), stepped) == 4
    assert choose_budget(falling([[0.6, 0.3, 0.2, 0.0]]), stepped) == 0


def test_costs_between_and_beyond_what_was_measured():
    measured = Costs((1, 3), (1.0, 3.0), (2, 4), (5.0, 9.0))
    assert measured.draft(2) == 2.0 and measured.draft(30) == 3.0
    assert measured.run(np.array([1, 3, 4, 5])).tolist() == [5.0, 7.0, 9.0, 9.0]


def test_the_likeliest_drafts_of_all_requests_go_first():
    survival = np.array([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3], [0.85, 0.0, 0.0]])
    assert admit(survival, 3).tolist() == [2, 0, 1]
    assert admit(survival, 6).tolist() == [2, 3, 1]
    assert admit(survival, 99).tolist() == [3, 3, 1]
    assert admit(survival, 0).tolist() == [0, 0, 0]


def test_equals_go_by_slot_then_row():
    assert admit(np.ones((2, 3)), 3).tolist() == [2, 1]


rows = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4)


@given(rows, st.integers(0, 12))
def test_what_is_admitted_is_the_best_choice_of_beginnings(values, budget):
    survival = falling(values)
    lengths = admit(survival, budget)
    assert lengths.sum() <= budget
    gained = sum(survival[r, :n].sum() for r, n in enumerate(lengths))
    best = max(
        sum(survival[r, :n].sum() for r, n in enumerate(choice))
        for choice in itertools.product(range(4), repeat=len(survival))
        if sum(choice) <= budget
    )
    assert gained == pytest.approx(best)


@given(rows, st.floats(0, 5), st.floats(0.01, 3))
def test_the_budget_has_the_highest_rate_of_all(values, draft, each):
    survival, measured = falling(values), costs(draft=draft, one=1.0, each=each)
    requests = len(survival)

    def rate(budget):
        lengths = admit(survival, budget)
        gained = requests + sum(survival[r, :n].sum() for r, n in enumerate(lengths))
        seconds = measured.run(np.array(requests + budget)) + (measured.draft(requests) if budget else 0.0)
        return float(gained / seconds)

    chosen = choose_budget(survival, measured)
    assert rate(chosen) == pytest.approx(max(rate(b) for b in range(int((survival > 0).sum()) + 1)))
