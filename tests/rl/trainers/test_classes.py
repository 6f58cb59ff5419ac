"""The difference of trainer and sampler has a figure for each way in which a context came about."""

import numpy as np
import pytest
import torch

from rl.algorithms import LossInputs
from rl.trainers.classes import ClassGaps, by_class


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


def test_every_trained_token_counts_and_those_of_the_present_weights_are_compared(make_sample):
    def sample(group, states):
        return make_sample([5] * 4, [0, 1, 1, 1], group=group, states=np.array(states, np.int8))

    members = [sample(9, [-1, 0, 1, 2]), sample(9, [-1, 0, 0, -1]), sample(3, [-1, 0, 0, 1])]
    version = torch.tensor([-1, 7, 7, 6, -1, 7, 7, 7, -1, 7, 7, 7])
    inputs = LossInputs(
        logprobs=torch.linspace(0, 1.1, 12),
        sampler_logprobs=torch.zeros(12),
        old_logprobs=torch.zeros(12),
        advantages=torch.zeros(12),
        mask=version >= 0,
        versions=version,
        segment_ids=torch.arange(3).repeat_interleave(4),
        segments=3,
        current_version=7,
    )
    gaps = ClassGaps(recovered_groups=4)
    gaps.add(inputs, members)
    assert gaps.summary() == {
        "tokens.unknown": 1,
        "tokens.own": 5,
        "tokens.mixed": 2,
        "tokens.replayed": 1,
        "kl.mismatch.own": pytest.approx((0.1 + 0.5 + 0.6) / 3),
        "kl.mismatch.own.max": pytest.approx(0.6),
        "kl.mismatch.own.tokens": 3,
        "kl.mismatch.mixed": pytest.approx(0.2),
        "kl.mismatch.mixed.max": pytest.approx(0.2),
        "kl.mismatch.mixed.tokens": 1,
    }
