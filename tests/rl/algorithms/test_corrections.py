import math

import pytest
import torch

from rl.algorithms.corrections import (
    decoupled_ppo,
    geometric_mask,
    icepop,
    opsm,
    sequence_tis,
    staleness_mask,
    token_tis,
)


def test_token_tis(make_inputs):
    inputs = make_inputs([0, 0, 0], old_logprobs=[-1, -1.5, -0.5], sampler_logprobs=[-1.5, -1, -1.5])
    torch.testing.assert_close(
        token_tis(inputs, tis_cap=2.0), torch.tensor([1.6487, 0.6065, 2.0]), atol=1e-4, rtol=0
    )


def test_sequence_tis_multiplies_over_the_sequence_and_never_overflows(make_inputs):
    inputs = make_inputs(
        [0.0] * 4, old_logprobs=[0.5, -0.2, 90, 9], sampler_logprobs=[0, 0, 0, 0], segment_ids=[0, 0, 1, 1]
    )
    torch.testing.assert_close(sequence_tis(inputs), torch.tensor([math.exp(0.3), math.exp(0.3), 5, 5]))


def test_icepop_zeroes_what_lies_outside(make_inputs):
    inputs = make_inputs(
        [0.0] * 3, old_logprobs=[math.log(0.4), math.log(2), math.log(6)], sampler_logprobs=[0] * 3
    )
    torch.testing.assert_close(icepop(inputs), torch.tensor([0.0, 2.0, 0.0]))


def test_decoupled_ppo_drops_large_weights(make_inputs):
    inputs = make_inputs([0.0] * 2, old_logprobs=[math.log(4), math.log(6)], sampler_logprobs=[0] * 2)
    torch.testing.assert_close(decoupled_ppo(inputs), torch.tensor([4.0, 0.0]))


@pytest.mark.parametrize(("log_ratios", "kept"), [([0.1, -0.1, 0], 1), ([0.5, 0.5, 0.5], 0)])
def test_geometric_mask(make_inputs, log_ratios, kept):
    inputs = make_inputs([0.0] * 3, old_logprobs=log_ratios, sampler_logprobs=[0] * 3)
    assert geometric_mask(inputs, geometric_low=0.9, geometric_high=1.1).tolist() == [kept] * 3


def test_opsm_drops_only_drifted_failures(make_inputs):
    inputs = make_inputs(
        [-2, -0.5, -2], sampler_logprobs=[0, 0, 0], advantages=[1, -1, -1], segment_ids=[0, 1, 2]
    )
    assert opsm(inputs, opsm_delta=1.0).tolist() == [1, 1, 0]


def test_opsm_keeps_at_equality_and_averages_over_sampled_tokens_only(make_inputs):
    inputs = make_inputs(
        [-1, -1, -100], sampler_logprobs=[0, 0, 0], advantages=[-1] * 3, mask=[True, True, False]
    )
    assert opsm(inputs, opsm_delta=1.0)[:2].tolist() == [1, 1]


def test_staleness_mask_goes_by_the_version_of_the_token(make_inputs):
    inputs = make_inputs([0.0] * 4, versions=[2, 4, 6, 7], current_version=7)
    assert staleness_mask(inputs, max_staleness=3).tolist() == [0, 1, 1, 1]
