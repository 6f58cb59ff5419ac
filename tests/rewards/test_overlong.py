import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.overlong import OverlongConfig


def test_values_of_the_paper_with_its_floor():
    config = OverlongConfig(max_length=20480, buffer=4096, floor=True)
    assert [config.value(n) for n in (0, 16384, 18432, 20480, 30000)] == [0, 0, -0.5, -1, -1]


def test_it_goes_on_rising_unless_a_floor_is_asked_for():
    config = OverlongConfig(max_length=100, buffer=50, penalty=2.0)
    assert [config.value(n) for n in (50, 75, 100, 150)] == [0, -1, -2, -4]


@given(st.integers(1, 100), st.integers(0, 300), st.booleans())
def test_longer_never_pays_less(buffer, tokens, floor):
    config = OverlongConfig(max_length=100, buffer=buffer, floor=floor)
    assert config.value(tokens + 1) <= config.value(tokens) <= 0


@pytest.mark.parametrize("settings", [{"buffer": 0}, {"buffer": 101}, {"buffer": 9, "penalty": -1.0}])
def test_constants_without_sense_are_refused(settings):
    with pytest.raises(ValueError, match="overlong"):
        OverlongConfig(max_length=100, **settings)
