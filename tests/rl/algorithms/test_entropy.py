import pytest

from rl.algorithms.entropy import next_coefficient, target_at


def test_the_target_stays_and_falls_to_zero():
    targets = [target_at(0.2, step, 100, 0.6) for step in range(101)]
    assert targets[0] == targets[60] == 0.2
    assert targets[80] == pytest.approx(0.1) and targets[100] == 0
    assert targets == sorted(targets, reverse=True)
    assert target_at(0.2, 150, 100, 0.6) == 0  # a resumed run may have fewer steps than it took


@pytest.mark.parametrize(
    ("coefficient", "entropy", "target", "expected"),
    [
        (0.01, 0.1, 0.2, 0.011),  # half below: half the rate up
        (0.01, 0.0, 0.2, 0.012),
        (0.01, 0.3, 0.2, 0.009),
        (0.01, 9.0, 0.2, 0.008),  # no batch moves it by more than the rate
        (0.01, 0.2, 0.2, 0.01),
        (0.01, 0.3, 0.0, 0.008),  # without a target left the weight falls
        (0.001, 9.0, 0.2, 0.0),
        (0.0495, 0.0, 0.2, 0.05),
    ],
)
def test_the_weight_rises_below_the_target_and_falls_above_it(coefficient, entropy, target, expected):
    changed = next_coefficient(coefficient, entropy, target, rate=2e-3, limit=0.05)
    assert changed == pytest.approx(expected)


def test_the_weight_settles_where_the_entropy_is_its_target():
    """A process whose entropy follows the weight, from a collapse and from an excess of it."""
    for coefficient in (0.0, 0.05):
        for _ in range(400):
            entropy = 0.02 + 10 * coefficient
            coefficient = next_coefficient(coefficient, entropy, 0.2, rate=1e-3, limit=0.05)
        assert 0.02 + 10 * coefficient == pytest.approx(0.2, abs=5e-3)
