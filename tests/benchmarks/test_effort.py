"""The figures of the effort benchmark hold for the best policy and are missed by one that ignores effort."""

from dataclasses import replace

from benchmarks.effort import GRID, control_figures, figures, optima
from rl.effort_curve import CurvePoint


def best_possible() -> list[CurvePoint]:
    blank = [CurvePoint(b, 100, 100, 0.0, 0.0, 0.0, 0.0, 0.0) for b in GRID]
    best = optima(blank)
    return [
        replace(
            p,
            score=best[p.effort].accuracy,
            reward=best[p.effort].reward,
            tokens=best[p.effort].tokens,
            calls=(best[p.effort].tokens - 3) / 3,
        )
        for p in blank
    ]


def missed(points: list[CurvePoint]) -> list[str]:
    return [check.name for check in figures(points, optima(points)) if not check.held]


def test_the_best_policy_misses_nothing() -> None:
    assert missed(best_possible()) == []


def test_a_policy_that_ignores_effort_misses_order_ratio_and_gain() -> None:
    flat = [replace(p, tokens=12.0, calls=3.0, score=0.78) for p in best_possible()]
    assert missed(flat) == [
        "greedy tokens at 1, 50, 100",
        "tokens(100) / tokens(1)",
        "accuracy(100) - accuracy(1)",
    ]


def test_a_policy_that_asks_too_much_at_one_effort_misses_the_regret() -> None:
    points = [replace(p, reward=p.reward - 0.5) if p.effort == 25 else p for p in best_possible()]
    assert missed(points) == ["mean regret to the optimum"]


def test_an_effort_beyond_its_neighbours_and_lost_samples_are_seen() -> None:
    points = [replace(p, calls=9.0) if p.effort == 60 else p for p in best_possible()]
    points[0] = replace(points[0], n_valid=99)
    assert missed(points) == ["samples without a score", "questions at 60, never trained at"]


def test_the_control_must_not_be_ordered() -> None:
    (ordered,) = control_figures(best_possible())
    (flat,) = control_figures([replace(p, tokens=9.0) for p in best_possible()])
    (rounding,) = control_figures([replace(p, tokens=9.0 + p.effort / 1000) for p in best_possible()])
    assert (ordered.held, flat.held, rounding.held) == (False, True, True)
