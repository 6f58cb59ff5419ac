import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.types import Missing, Score
from rewards.length import LengthPenaltyConfig, apply

GOLDEN = LengthPenaltyConfig(k0=0.2, max_penalty=0.1, length_scale=8000, efforts=(25, 50, 75, 100))


def config(**changes):
    base = {"k0": 0.2, "max_penalty": 0.1, "length_scale": 8000, "efforts": (25, 50, 75, 100)}
    return LengthPenaltyConfig(**{**base, **changes})


@pytest.mark.parametrize(
    ("effort", "price", "at_8000", "at_20000"),
    [
        (25, 0.2, -0.1, -0.1),
        (50, 0.073576, -0.073576, -0.1),
        (75, 0.027067, -0.027067, -0.067668),
        (100, 0.009957, -0.009957, -0.024894),
    ],
)
def test_the_penalty_has_the_worked_values(effort, price, at_8000, at_20000):
    assert GOLDEN.tau == 25
    assert GOLDEN.price(effort) == pytest.approx(price, abs=5e-7)
    assert GOLDEN.penalty(effort, 8000) == pytest.approx(at_8000, abs=5e-7)
    assert GOLDEN.penalty(effort, 20000) == pytest.approx(at_20000, abs=1.5e-6)


def test_tau_is_the_scaled_mean_gap_of_the_efforts():
    assert config(efforts=(1, 25, 50, 75, 100)).tau == pytest.approx(99 / 4)
    assert config(efforts=(10, 30), tau_scale=2.0).tau == 40


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_penalty_falls_with_effort_and_grows_with_length(b1, b2, l1, l2):
    low, high = sorted((b1, b2))
    short, long = sorted((l1, l2))
    assert -0.1 <= GOLDEN.penalty(low, long) <= GOLDEN.penalty(low, short) <= 0
    assert GOLDEN.penalty(low, long) <= GOLDEN.penalty(high, long)


@given(
    effort=st.integers(1, 100),
    right=st.integers(0, 10**7),
    wrong=st.integers(0, 10**7),
    cut=st.booleans(),
    k0=st.floats(0, 100),
    cap=st.floats(0, 0.999),
)
def test_no_wrong_answer_beats_a_right_one(effort, right, wrong, cut, k0, cap):
    penal = config(k0=k0, max_penalty=cap, gate="always")
    scores = [Score(1.0), Score(0.0)]
    a, b = apply(penal, scores, effort=effort, tokens=[right, wrong], truncated=[cut, False])
    assert a.value > b.value


def test_the_parts_of_a_score_tell_outcome_and_length_apart():
    scores = [Score(1.0, {"exact": 1.0}), Missing("timeout"), Score(0.0, {"exact": 0.0})]
    done = apply(GOLDEN, scores, effort=50, tokens=[4000, 10**6, 8000], truncated=[False, False, False])
    assert done[0].parts == {"exact": 1.0, "outcome": 1.0, "length": pytest.approx(-0.036788, abs=1e-6)}
    assert done[0].value == 1.0 + done[0].parts["length"]
    assert done[1] == Missing("timeout")
    assert done[2].value == pytest.approx(-0.073576, abs=1e-6)


def test_a_group_without_a_right_answer_pays_only_when_the_gate_is_open():
    def total(gate):
        scores = [Score(0.0), Score(0.0)]
        done = apply(config(gate=gate), scores, effort=25, tokens=[100, 8000], truncated=[False, False])
        return [score.value for score in done]

    assert total("any_correct") == [0.0, 0.0]
    assert total("always") == pytest.approx([-0.0025, -0.1])


def test_a_truncated_sample_pays_the_most():
    (score,) = apply(GOLDEN, [Score(1.0)], effort=100, tokens=[10], truncated=[True])
    assert score.value == 0.9


def test_the_price_warms_up():
    warm = config(warmup_steps=10)
    assert [warm.price(25, step) for step in (0, 5, 10, 20)] == pytest.approx([0.0, 0.1, 0.2, 0.2])
    assert warm.price(25) == 0.2
    (score,) = apply(warm, [Score(1.0)], effort=25, tokens=[10], truncated=[True], step=0)
    assert score.value == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_penalty": 1.0}, "short wrong answer could beat"),
        ({"max_penalty": 0.5, "reward_correct": 0.5}, "reward_correct - reward_wrong = 0.5"),
        ({"k0": -1.0}, "k0"),
        ({"k0": float("nan")}, "finite"),
        ({"length_scale": 0.0}, "length_scale"),
        ({"tau_scale": 0.0}, "tau_scale"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"gate": "never"}, "any_correct or always"),
        ({"efforts": (50,)}, "efforts"),
        ({"efforts": (50, 25)}, "efforts"),
        ({"efforts": (0, 25)}, "efforts"),
        ({"efforts": ()}, "efforts"),
    ],
)
def test_constants_that_make_no_sense_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
