"""The difference of trainer and sampler has a figure for each way in which a context came about."""

import numpy as np
import pytest

from rl.trainers.classes import by_class


def test_each_class_has_its_mean_maximum_and_number():
    gaps, states = np.array([0.5, 0.1, 0.3, 9.0]), np.array([1, 0, 0, -1])
    assert by_class(gaps, states) == {
        "kl.mismatch.own": pytest.approx(0.2),
        "kl.mismatch.own.max": 0.3,
        "kl.mismatch.own.tokens": 2,
        "kl.mismatch.mixed": pytest.approx(0.5),
        "kl.mismatch.mixed.max": 0.5,
        "kl.mismatch.mixed.tokens": 1,
    }
